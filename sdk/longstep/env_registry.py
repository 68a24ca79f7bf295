"""The known environments: entries by id, from the built-in table, from `register` and from other distributions.

Entry points of the group `longstep.envs` are read when an id is first looked up. The name of an entry point is the id;
its object is a class or function that gives a Gymnasium environment, or an `EnvEntry`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import parse_env_id

from longstep.actions import ActionParser
from longstep.arguments import check_callable, check_count, check_mapping, check_text
from longstep.errors import ConfigError, RegistryError, did_you_mean
from longstep.memory import Memory
from longstep.prompt import PromptTemplate

__all__ = ["EntryPoint", "EnvEntry", "Registry", "registry"]

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

_MEMORY = ("update", "get_memory_text", "reset")


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
        if not isinstance(cast(Any, id), str):
            raise _unknown(id, self)
        plugins = _plugins().get(id, {})
        if len(plugins) + (id in self._entries) > 1:
            raise RegistryError(
                f"expected one environment with the id `{id}`, got one more from the entry point "
                f"{', '.join(plugins)}; uninstall one of the distributions"
            )
        for plugin in plugins.values():
            return _read_plugin(plugin)
        if id not in self._entries:
            raise _unknown(id, self)
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
        return isinstance(id, str) and (id in self._entries or id in _plugins())

    def add(self, entry: EnvEntry) -> None:
        """Add an entry under an id that is free."""
        _check_entry(entry)
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
        if not isinstance(cast(Any, id), str) or id not in self._entries:
            raise _unknown(id, self)
        del self._entries[id]


def _unknown(id: Any, known: Iterable[str]) -> RegistryError:
    hint = did_you_mean(str(id), known)
    return RegistryError(f"expected a registered id, got `{id!s:.100}`; {hint}")


def _check_entry(entry: Any) -> None:
    """Raise for a field of the wrong kind, before an environment is made from it."""
    if not isinstance(entry, EnvEntry):
        raise ConfigError(f"expected an EnvEntry as `entry`, got {entry!r:.100}")
    check_text("id", entry.id)
    if not isinstance(entry.entry_point, str):
        check_callable("entry_point", entry.entry_point)
    check_mapping("kwargs", entry.kwargs)
    check_mapping("settings", entry.settings)
    check_count("max_steps", entry.max_steps, 1, optional=True)
    for name, methods in (("memory", _MEMORY), ("prompt", ("build",)), ("parser", ("parse",))):
        value = getattr(entry, name)
        is_one = all(hasattr(value, method) for method in methods)
        if value is not None and not is_one and not callable(value):
            raise ConfigError(
                f"expected a {name}, or a class or function that gives one, as `{name}`, got {value!r:.100}"
            )


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
