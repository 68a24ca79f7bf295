"""Ids of environments: `register` one, `make` one, list them in `registry`.

Three sources: the built-in table below, `register`, and the entry points of the group `longstep.envs`, which are read
when an id is first looked up. The name of an entry point is the id; its object is a class or function that gives a
Gymnasium environment, or an `EnvEntry`. An id that is in none of them is looked up in Gymnasium's own registry.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, parse_env_id

from longstep.actions import ActionParser
from longstep.defaults import own_copy
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, RegistryError, did_you_mean
from longstep.memory import Memory
from longstep.prompt import PromptTemplate

__all__ = ["EnvEntry", "Registry", "make", "register", "registry"]

ENTRY_POINT_GROUP = "longstep.envs"

EntryPoint = str | Callable[..., "gymnasium.Env[Any, Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvEntry:
    """How to make an environment."""

    id: str
    entry_point: EntryPoint
    """A class or function that gives a gymnasium.Env, or `"module:attribute"` of one."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the entry point."""
    max_steps: int | None = None
    memory: Memory | Callable[[], Memory] | None = None
    """A memory that is copied for each environment, or a class or function that gives one."""
    prompt: PromptTemplate | Callable[[], PromptTemplate] | None = None
    parser: ActionParser | Callable[[], ActionParser] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of `LLMAgentEnv`."""


_BUILT_IN = (
    EnvEntry(id="longstep/KeyDoor-v0", entry_point="longstep.envs.keydoor:KeyDoorEnv"),
    EnvEntry(id="longstep/Sokoban-v0", entry_point="longstep.envs.sokoban:SokobanEnv"),
)

_WRAPPER_ARGUMENTS = frozenset(inspect.signature(LLMAgentEnv.__init__).parameters) - {"self", "env"}


class Registry(Mapping[str, EnvEntry]):
    """The known environments by id, without Gymnasium's.

    >>> "longstep/KeyDoor-v0" in registry
    True
    """

    def __init__(self) -> None:
        self._entries = {entry.id: entry for entry in _BUILT_IN}
        self._plugins: dict[str, importlib.metadata.EntryPoint] | None = None

    def __getitem__(self, id: str) -> EnvEntry:
        """The entry of an id; RegistryError with the nearest id when there is none."""
        if id in self._entries:
            return self._entries[id]
        plugin = self._known_plugins().get(id)
        if plugin is None:
            raise RegistryError(f"expected a registered id, got `{id}`; {did_you_mean(id, self)}")
        loaded = plugin.load()
        entry = loaded if isinstance(loaded, EnvEntry) else EnvEntry(id=id, entry_point=loaded)
        self._entries[id] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        """The ids, sorted."""
        return iter(sorted({*self._entries, *self._known_plugins()}))

    def __len__(self) -> int:
        """Number of ids."""
        return len({*self._entries, *self._known_plugins()})

    def __contains__(self, id: object) -> bool:
        """Whether the id is known; loads nothing."""
        return id in self._entries or id in self._known_plugins()

    def add(self, entry: EnvEntry) -> None:
        """Add an entry under an id that is free."""
        try:
            parse_env_id(entry.id)
        except gymnasium.error.Error as error:
            raise ConfigError(
                f"expected an id such as `MyEnv-v0` or `team/MyEnv-v0`, got {entry.id!r}; {error}"
            ) from error
        if entry.id in self:
            raise RegistryError(
                f"expected an id that is free, got `{entry.id}`, which is registered; choose another, "
                "or a new version of it"
            )
        self._entries[entry.id] = entry

    def remove(self, id: str) -> None:
        """Take out an id that `register` brought in."""
        if id not in self._entries:
            raise RegistryError(f"expected a registered id, got `{id}`; {did_you_mean(id, self)}")
        del self._entries[id]

    def _known_plugins(self) -> dict[str, importlib.metadata.EntryPoint]:
        if self._plugins is None:
            found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
            self._plugins = {plugin.name: plugin for plugin in found}
        return self._plugins


registry = Registry()
"""The environments that `make` knows before it asks Gymnasium."""


def register(
    id: str,
    entry_point: EntryPoint,
    *,
    kwargs: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    memory: Memory | Callable[[], Memory] | None = None,
    prompt: PromptTemplate | Callable[[], PromptTemplate] | None = None,
    parser: ActionParser | Callable[[], ActionParser] | None = None,
    **settings: Any,
) -> None:
    """Give an environment an id.

    Args:
        id: A free id in Gymnasium's form, such as `team/MyEnv-v0`.
        entry_point: A class or function that gives a gymnasium.Env, or `"module:attribute"` of one.
        kwargs: Arguments of the entry point; `make` can override them.
        max_steps: Steps after which an episode is truncated; None leaves it to the environment.
        memory: A memory, which is copied for each environment, or a class or function that gives one.
        prompt: The template of its prompts, or what gives it.
        parser: What reads its actions, or what gives it.
        settings: Further arguments of `LLMAgentEnv`, by name.

    Raises:
        RegistryError: The id is registered already.
    """
    unknown = sorted(set(settings) - _WRAPPER_ARGUMENTS)
    if unknown:
        raise ConfigError(
            f"expected arguments of LLMAgentEnv, got `{unknown[0]}`; "
            f"{did_you_mean(unknown[0], _WRAPPER_ARGUMENTS)}; arguments of the environment go into `kwargs`"
        )
    registry.add(
        EnvEntry(
            id=id,
            entry_point=entry_point,
            kwargs=dict(kwargs or {}),
            max_steps=max_steps,
            memory=memory,
            prompt=prompt,
            parser=parser,
            settings=settings,
        )
    )


def make(id: str, **kwargs: Any) -> LLMAgentEnv:
    """A new environment by id.

    Args:
        id: Registered here or with Gymnasium.
        kwargs: Those that LLMAgentEnv knows by name go to it (a memory is copied, or made by the class or function
            given, so that no two environments share one); the others go to the environment.

    Raises:
        RegistryError: The id is unknown.

    >>> make("longstep/KeyDoor-v0", max_steps=10).max_steps
    10
    """
    own = {name: value for name, value in kwargs.items() if name in _WRAPPER_ARGUMENTS}
    inner = {name: value for name, value in kwargs.items() if name not in _WRAPPER_ARGUMENTS}
    if id in registry:
        entry = registry[id]
        raw = _load(entry)(**{**entry.kwargs, **inner})
        given = {
            **entry.settings, "max_steps": entry.max_steps, "memory": entry.memory,
            "prompt": entry.prompt, "parser": entry.parser,
        }  # fmt: skip
    else:
        raw, given = _make_with_gymnasium(id, inner)
    settings = given | {name: value for name, value in own.items() if value is not None}
    for name in ("memory", "prompt", "parser"):
        settings[name] = own_copy(settings.get(name))
    env = LLMAgentEnv(raw, **settings)
    env.spec = EnvSpec(
        id=id,
        entry_point=functools.partial(make, id),
        kwargs=copy.copy(kwargs),
        order_enforce=False,
        disable_env_checker=True,
    )
    return env


def _load(entry: EnvEntry) -> Callable[..., Any]:
    if callable(entry.entry_point):
        return entry.entry_point
    module, colon, attribute = entry.entry_point.partition(":")
    if not colon:
        raise ConfigError(
            f"expected `module:attribute` as entry point of `{entry.id}`, got `{entry.entry_point}`"
        )
    return getattr(importlib.import_module(module), attribute)


def _make_with_gymnasium(
    id: str, kwargs: dict[str, Any]
) -> tuple[gymnasium.Env[Any, Any], dict[str, Any]]:
    """The environment without Gymnasium's time limit, which becomes the wrapper's."""
    known = gymnasium.envs.registry
    if id not in known and ":" not in id:
        raise RegistryError(
            f"expected a registered id, got `{id}`; {did_you_mean(id, [*registry, *known])}"
        )
    raw = gymnasium.make(id, max_episode_steps=-1, disable_env_checker=True, **kwargs)
    return raw, {"max_steps": known[id.rpartition(":")[2]].max_episode_steps}
