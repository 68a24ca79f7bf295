"""The settings of actors: see `longstep_trainers.config`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from longstep.errors import ConfigError
from longstep_trainers.setting_checks import above, at_least, one_of, within

__all__ = ["ActorConfig"]

ENGINES = ("transformers", "vllm")
"""Values of `actor.engine`."""
_OF_NEW_ACTORS = ("python", "dtype", "gpu_memory_share")
"""What only actors that are started can be told."""


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """Where completions are made: in the trainer's own process, or by actors, processes that serve an engine."""

    engine: str = "transformers"
    """Model runtime: `transformers`, or `vllm`, which needs actors."""
    num_actors: int = 0
    """Actor processes to start on this machine; 0 means the trainer's own process, unless `addresses` names actors."""
    max_staleness: int = 0
    """Weight updates by which a completion may lag behind those that train on it. 0 plays and updates in turn; above 0,
    which needs actors, trajectories go on during updates and older ones are dropped."""
    python: str | None = None
    """Interpreter of the actors; None means the trainer's own."""
    addresses: list[str] = field(default_factory=list[str])
    """Actors that run already (`longstep serve-actor`), such as `tcp://10.0.0.2:7000`; none is started then."""
    key: str | None = None
    """Own secret key, a file `name.key_secret`, for addresses on other machines; `longstep keys` makes it."""
    server_key: str | None = None
    """The actors' public key, a file `name.key`; goes with `key`."""
    weights_route: Literal["auto", "shared_memory", "wire", "cuda"] = "auto"
    """How new weights reach the actors; `auto` takes the fastest that works."""
    probe_tolerance: float = 0.5
    """Largest mean difference, in nats per token, between an actor's log-probabilities and the trainer's after new
    weights have arrived; more ends the run. bfloat16 explains up to 0.15."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights in the actors; `auto` is that of the trainer's model."""
    gpu_memory_share: float = 0.5
    """Share of a GPU's memory that vLLM takes, in (0, 1]."""
    start_timeout_s: float = 300.0
    """Longest wait for the actors to be ready, in seconds."""

    def __post_init__(self) -> None:
        """Check each value and what cannot go together."""
        one_of(ENGINES, self.engine, "actor.engine")
        for name in ("num_actors", "max_staleness"):
            at_least(0, getattr(self, name), f"actor.{name}")
        for name in ("probe_tolerance", "start_timeout_s"):
            above(0, getattr(self, name), f"actor.{name}")
        above(0, self.gpu_memory_share, "actor.gpu_memory_share")
        within(0.0, 1.0, self.gpu_memory_share, "actor.gpu_memory_share")
        if self.addresses and self.num_actors not in (0, len(self.addresses)):
            raise ConfigError(
                f"expected `actor.num_actors` of 0 beside `actor.addresses`, got {self.num_actors}; those actors run "
                "already, and none is started"
            )
        if (self.key is None) != (self.server_key is None) or (self.key and not self.addresses):
            raise ConfigError(
                "expected `actor.key` and `actor.server_key` together, and for `actor.addresses`, got "
                f"{self.key}, {self.server_key} and {len(self.addresses)} addresses; name both files, or neither"
            )
        if self.addresses:
            self._refuse_changed(
                _OF_NEW_ACTORS, "beside `actor.addresses`, whose actors run already"
            )
        if self.python is not None and shutil.which(self.python) is None:
            raise ConfigError(
                f"expected an interpreter, got `{self.python}` at `actor.python`; name the file, as in "
                ".venv-vllm/bin/python"
            )
        if not self.uses_actors:
            self._check_in_process()

    def _check_in_process(self) -> None:
        """Refuse what only actors can do."""
        more = "; add `--actor.num_actors 1`"
        if self.engine != "transformers":
            raise ConfigError(
                f"expected actors for the engine `{self.engine}`, got 0 at `actor.num_actors`{more}"
            )
        if self.max_staleness:
            raise ConfigError(
                f"expected 0 at `actor.max_staleness` without actors, got {self.max_staleness}: the trainer's own process "
                f"cannot sample from weights while it changes them{more}"
            )
        self._refuse_changed(("weights_route", *_OF_NEW_ACTORS), f"without actors{more}")

    def _refuse_changed(self, names: Iterable[str], why: str) -> None:
        """Refuse settings that would have no effect."""
        for name in names:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"expected no `actor.{name}`, got `{value}` {why}")

    @property
    def uses_actors(self) -> bool:
        """True when completions come from other processes."""
        return bool(self.num_actors or self.addresses)
