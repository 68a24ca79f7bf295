"""`EnvSpec`: how a worker process makes an environment, as plain data, for functions cannot cross and are never sent.

A worker gets its spec from the process that starts it, over a pipe. Nothing of a spec ever comes from a socket: a client
of a server can only ask for one of the environments that the server was started with, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from longstep.errors import ConfigError, UnsupportedTypeError, did_you_mean

__all__ = ["EnvSpec", "as_spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to make an environment in another process.

    >>> EnvSpec(env_id="longstep/KeyDoor-v0", kwargs={"size": 5}).name
    'longstep/KeyDoor-v0'
    """

    env_id: str | None = None
    """An id that `longstep.make` knows in the worker, once `imports` are imported. Exactly one of this and
    `entry_point` is given."""
    entry_point: str | None = None
    """`module:attribute` of a class or function that gives an environment, a gymnasium.Env or an LLMAgentEnv."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `longstep.make`, or of the entry point: plain values, see `longstep_bindings.wire`."""
    imports: tuple[str, ...] = ()
    """Modules that the worker imports first, such as those that register environments."""
    wrap: bool = True
    """Make it an LLMAgentEnv, if it is not one yet, so that results have prompts. False leaves what the entry point
    gives as it is: actions and observations are then its own. With `env_id`, always an LLMAgentEnv unless False."""
    blocking: bool = False
    """True for an environment whose step waits (browser, network, another process): each gets a thread of its own
    within its worker, and its results travel alone. False: a worker's environments run one after the other, in its
    main thread, and their results travel as one message."""
    python: str | None = None
    """Interpreter of the worker: a version such as `3.10`, or a path. None: this process's own."""
    requirements: tuple[str, ...] = ()
    """What is installed for the worker, in an interpreter of its own; empty means nothing is."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the worker, beside this process's own."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, or cannot cross."""
        if (self.env_id is None) == (self.entry_point is None):
            given = "neither" if self.env_id is None else "both"
            raise ConfigError(f"expected exactly one of `env_id` and `entry_point`, got {given}")
        if self.entry_point is not None:
            module, _, attribute = self.entry_point.partition(":")
            if not module or not attribute:
                raise ConfigError(
                    f"expected `entry_point` as `module:attribute`, got {self.entry_point!r}"
                )
        for name in ("imports", "requirements"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ConfigError(f"expected `{name}` as a tuple of str, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        self._check_kwargs()

    def _check_kwargs(self) -> None:
        from longstep_bindings.wire import encode

        try:
            num_frames = len(encode(dict(self.kwargs)))
        except UnsupportedTypeError as error:
            raise ConfigError(
                f"expected plain values in `kwargs`, for they go to another process: {error}; "
                "make the value in a function of a module and name that as `entry_point`"
            ) from None
        if num_frames > 1:
            raise ConfigError(
                "expected no large array in `kwargs`; let the environment load it from a file"
            )

    @property
    def name(self) -> str:
        """What clients ask for."""
        return self.env_id or self.entry_point or ""

    def to_plain(self) -> dict[str, Any]:
        """The spec as plain values; `from_plain` reads them."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> EnvSpec:
        """The spec of `to_plain`.

        Raises:
            ConfigError: A field is unknown or has a value that cannot be meant.
        """
        known = {entry.name for entry in fields(cls)}
        for name in plain:
            if name not in known:
                raise ConfigError(
                    f"expected a field of EnvSpec, got `{name}`; {did_you_mean(name, known)}"
                )
        return cls(**plain)


def as_spec(env: Any, env_kwargs: Mapping[str, Any] | None) -> EnvSpec:
    """The spec of what a caller names.

    Args:
        env: An id, a spec, or a function or class of a module.
        env_kwargs: Arguments of the environment, beside those of a spec; None is none.

    Raises:
        ConfigError: A worker cannot find it by its name.
    """
    kwargs = dict(env_kwargs or {})
    if isinstance(env, EnvSpec):
        return replace(env, kwargs={**env.kwargs, **kwargs})
    if isinstance(env, str):
        return EnvSpec(env_id=env, kwargs=kwargs)
    name = getattr(env, "__qualname__", "")
    if not callable(env) or "<" in name or not name or env.__module__ == "__main__":
        raise ConfigError(
            f"expected `env` to be an environment id, an EnvSpec, or a function of a module, got {env!r:.100}; "
            "workers import what they run, so put the function into a module of its own"
        )
    return EnvSpec(entry_point=f"{env.__module__}:{name}", kwargs=kwargs)
