"""The protocol between a rollout and its environments: commands go in, results come out, matched by id, never by order.

Words: a *slot* is one place for one environment; a *command* resets or steps the environment of one slot. One
environment's exception is that slot's `EnvResult.error` and nobody else's, and the environment is built anew at the
slot's next reset. There is no autoreset: a finished environment rests until it is told to reset. The names here are
public in `longstep.vector`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from longstep.types import Task

__all__ = ["EnvCommand", "EnvResult", "VectorEnv", "next_command_id"]

_command_ids = itertools.count(1)


def next_command_id() -> int:
    """A number that no other command of this process has."""
    return next(_command_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCommand:
    """What one environment is told: exactly one of `task` (reset) and `action` (step)."""

    slot: int
    """Index of the environment, from 0."""
    command_id: int
    """Given back in the result; see `next_command_id`."""
    task: Task | None = None
    """Reset to the start of this task."""
    action: str | None = None
    """Step with this completion of the model, raw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvResult:
    """What one environment answered to one command. After a reset, `reward` is 0 and both flags are False."""

    slot: int
    command_id: int
    observation: str
    """Text of the next prompt; empty when `error` is given."""
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    """As `LLMAgentEnv` gives it; empty when `error` is given."""
    error: str | None
    """Type and message of what the environment raised; None when all is well."""
    seconds: float
    """Wall time that the environment took."""


@runtime_checkable
class VectorEnv(Protocol):
    """Environments that take commands and give results, in process or remote."""

    @property
    def num_envs(self) -> int:
        """Number of slots."""
        ...

    def send(self, commands: Sequence[EnvCommand]) -> None:
        """Take commands without waiting; a slot has one command at a time.

        Raises:
            ConfigError: A command is wrong; none of `commands` was taken.
        """
        ...

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> list[EnvResult]:
        """Results that are ready, in any order.

        Args:
            min_ready: Wait for this many, or for all that are under way if those are fewer.
            timeout_s: Longest wait; then what is there is returned, perhaps nothing. None waits for ever.
        """
        ...

    def close(self) -> None:
        """Close every environment. Idempotent."""
        ...
