"""What to start as an actor, and how its pool treats it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longstep.errors import ConfigError

__all__ = ["ActorSpec", "PoolSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """An engine and a model, and the interpreter to run them in.

    >>> ActorSpec(model="out/model").engine
    'transformers'
    """

    model: str
    """A model folder in Hugging Face form, or what else the engine takes as a model."""
    engine: str = "transformers"
    """`transformers`, `vllm`, `openai`, or `module:function`; see `open_engine`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `open_engine` takes beside the two."""
    python: str | None = None
    """Interpreter to run in, with longstep and the engine's runtime installed; None is this one."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of this process, such as `CUDA_VISIBLE_DEVICES`."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not self.model or not self.engine:
            raise ConfigError("expected an engine and a model, got an empty one")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """How a pool treats its actors and their requests."""

    max_in_flight: int = 256
    """Most requests under way at one actor; the others wait in the pool, and go wherever there is room first."""
    max_queued: int = 1 << 16
    """Most requests that wait in the pool; a `submit` beyond that raises."""
    request_timeout_s: float = 600.0
    """How long a request may take, its time in the pool and its repetitions included; then it has failed."""
    stall_timeout_s: float = 300.0
    """An actor that owes completions and gives none for so long hangs, and is replaced."""
    max_resubmits: int = 3
    """Times that a request is handed over again after its actor died; after one more death it has failed."""
    max_restarts: int = 10
    """Times that one actor may go down; after one more it stays down."""
    start_timeout_s: float = 600.0
    """Seconds until a new actor must have its model loaded; also until an actor elsewhere that went down is back."""
    update_timeout_s: float = 600.0
    """Seconds that new weights may take, from the first byte sent until they serve."""
    lost_after_s: float = 30.0
    """Silence after which an actor counts as gone."""
    affinity_slack: int = 4
    """A trajectory changes its actor when that has so many more requests under way than another, and a quarter more."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, least in {
            "max_in_flight": 1,
            "max_queued": 1,
            "max_resubmits": 0,
            "max_restarts": 0,
            "affinity_slack": 0,
        }.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"expected `{name}` of at least {least}, got {value!r}")
        for name in (
            "request_timeout_s",
            "stall_timeout_s",
            "start_timeout_s",
            "update_timeout_s",
            "lost_after_s",
        ):
            if not 0.0 < getattr(self, name) < 1e7:
                raise ConfigError(
                    f"expected seconds above 0 as `{name}`, got {getattr(self, name)!r}"
                )
