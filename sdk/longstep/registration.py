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
from dataclasses import dataclass, field, replace
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, parse_env_id

from longstep.actions import ActionParser
from longstep.arguments import check_callable, check_text
from longstep.defaults import own_copy
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, RegistryError, did_you_mean
from longstep.memory import Memory
from longstep.prompt import PromptTemplate

__all__ = ["EnvEntry", "Registry", "make", "register", "registry"]

ENTRY_POINT_GROUP = "longstep.envs"
"""Where other distributions declare environments."""

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

    def __getitem__(self, id: str) -> EnvEntry:
        """The entry of an id.

        Raises:
            RegistryError: No such id, or more than one distribution brings it.
        """
        plugins = _plugins().get(id, {})
        if len(plugins) + (id in self._entries) > 1:
            raise RegistryError(
                f"expected one environment with the id `{id}`, got one more from the entry point "
                f"{', '.join(plugins)}; uninstall one of the distributions"
            )
        for plugin in plugins.values():
            return _read_plugin(plugin)
        if id not in self._entries:
            raise RegistryError(f"expected a registered id, got `{id}`; {did_you_mean(id, self)}")
        return self._entries[id]

    def get(self, key: str, default: Any = None) -> Any:
        """The entry of an id, or `default`."""
        return self[key] if key in self else default  # noqa: SIM401 - this is that `get`

    def __iter__(self) -> Iterator[str]:
        """The ids, sorted."""
        return iter(sorted({*self._entries, *_plugins()}))

    def __len__(self) -> int:
        """Number of ids."""
        return len({*self._entries, *_plugins()})

    def __contains__(self, id: object) -> bool:
        """Whether the id is known; loads nothing."""
        return id in self._entries or id in _plugins()

    def add(self, entry: EnvEntry) -> None:
        """Add an entry under an id that is free."""
        check_text("id", entry.id)
        if not isinstance(entry.entry_point, str):
            check_callable("entry_point", entry.entry_point)
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


@functools.cache
def _plugins() -> dict[str, dict[str, importlib.metadata.EntryPoint]]:
    """Entry points by id and by what they point to, read once in a process."""
    found: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for plugin in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(plugin.name, {})[plugin.value] = plugin
    return found


def _read_plugin(plugin: importlib.metadata.EntryPoint) -> EnvEntry:
    try:
        loaded = plugin.load()
    except Exception as error:  # a foreign distribution may fail in any way
        raise RegistryError(
            f"expected the entry point `{plugin.name}` = {plugin.value} to load, got "
            f"{type(error).__name__}: {error}; reinstall its distribution"
        ) from error
    if isinstance(loaded, EnvEntry):
        return replace(loaded, id=plugin.name)
    return EnvEntry(id=plugin.name, entry_point=loaded)


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
    check_text("id", id)
    own = {name: value for name, value in kwargs.items() if name in _WRAPPER_ARGUMENTS}
    inner = {name: value for name, value in kwargs.items() if name not in _WRAPPER_ARGUMENTS}
    made = _make_registered(registry[id], inner) if id in registry else _make_known(id, inner)
    raw, settings = made
    settings |= {name: value for name, value in own.items() if value is not None}
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


def _make_registered(
    entry: EnvEntry, kwargs: Mapping[str, Any]
) -> tuple[gymnasium.Env[Any, Any], dict[str, Any]]:
    """The environment of an entry, and the entry's arguments for the wrapper."""
    creator = entry.entry_point
    if isinstance(creator, str):
        module, _, attribute = creator.partition(":")
        creator = cast("Callable[..., gymnasium.Env[Any, Any]]", _load(entry, module, attribute))
    arguments = {**entry.kwargs, **kwargs}
    _check_arguments(entry.id, creator, arguments)
    settings: dict[str, Any] = {
        **entry.settings,
        "max_steps": entry.max_steps,
        "memory": entry.memory,
        "prompt": entry.prompt,
        "parser": entry.parser,
    }
    return creator(**arguments), settings


def _load(entry: EnvEntry, module: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ValueError, AttributeError, ImportError) as error:
        if isinstance(error, ImportError) and not _is_absent(module, error):
            raise  # the module is there and lacks a dependency, which its own error names
        raise RegistryError(
            f"expected `module:attribute` of a class or function as entry point of `{entry.id}`, got "
            f"`{entry.entry_point}`: {error}"
        ) from error


def _is_absent(module: str, error: ImportError) -> bool:
    """True when the module itself, or a package it should be in, was not found."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")


def _check_arguments(id: str, creator: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise for an argument that neither the environment nor the wrapper knows."""
    try:
        parameters = inspect.signature(creator).parameters
    except (TypeError, ValueError):  # some callables have no signature; they check for themselves
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            raise ConfigError(
                f"expected arguments of `{id}` or of LLMAgentEnv, got `{name}`; "
                f"{did_you_mean(name, {*parameters, *_WRAPPER_ARGUMENTS})}"
            )


def _make_known(
    id: str, kwargs: Mapping[str, Any]
) -> tuple[gymnasium.Env[Any, Any], dict[str, Any]]:
    """An environment of Gymnasium's registry without its time limit, which becomes the wrapper's."""
    known = gymnasium.envs.registry
    if id not in known and ":" not in id:
        hint = did_you_mean(id, [*registry, *known])
        if hint.startswith("known"):
            hint = did_you_mean(id, registry)
        raise RegistryError(f"expected a registered id, got `{id}`; {hint}")
    raw = gymnasium.make(id, max_episode_steps=-1, disable_env_checker=True, **kwargs)
    return raw, {"max_steps": known[id.rpartition(":")[2]].max_episode_steps}
