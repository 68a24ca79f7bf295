"""What a client remembers of each slot: enough to build its environment again in another worker and to see that it is equal.

A slot's log holds the task, the actions that were answered, and a key for the state after the reset and after each of
them: the state key, or for a raw environment a text observation itself. A new worker is told to reset and to repeat the
actions; the keys must come out the same. The command that was under way is then sent again: its effect went down with
the old worker, so it is applied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longstep.commands import EnvCommand
from longstep.errors import UnsupportedTypeError
from longstep.state_key import state_key
from longstep.types import Task

__all__ = ["SlotLog", "key_of"]

CHUNK = 64
"""Actions in one replay message."""


class SlotLog:
    """The log of one slot. Its owner's lock guards it."""

    __slots__ = (
        "actions",
        "attempts",
        "in_episode",
        "keys",
        "lost",
        "num_steps",
        "pending",
        "task",
    )

    def __init__(self) -> None:
        self.task: Task | None = None
        """What the slot was reset to; None before, and after a failure."""
        self.actions: list[Any] = []
        self.keys: list[Any] = []
        self.num_steps = 0
        """Actions that were answered since the reset."""
        self.in_episode = False
        self.pending: EnvCommand | None = None
        """The command under way."""
        self.attempts = 0
        """Times that a worker went down while it executed this slot, since the last answer."""
        self.lost: str | None = None
        """Why the environment could not be built again; told at the next step."""

    def finish(self, command: EnvCommand, key: Any, *, ok: bool, over: bool) -> None:
        """Take the answer to the pending command. Safe to repeat when it was interrupted.

        Args:
            command: The pending one.
            key: Of the state that it led to.
            ok: False when it failed.
            over: True when the episode ended.
        """
        num_steps = 0
        if not ok:
            self.task, self.actions, self.keys = None, [], []
        elif command.task is not None:
            self.task, self.actions, self.keys = command.task, [], [key]
        else:
            num_steps = self.num_steps + 1
            if len(self.actions) >= num_steps:  # a first try was interrupted
                del self.actions[num_steps - 1 :], self.keys[num_steps:]
            self.actions.append(command.action)
            self.keys.append(key)
        self.attempts, self.lost, self.in_episode = 0, None, ok and not over
        self.num_steps, self.pending = num_steps, None

    def follow(self, other: SlotLog) -> None:
        """Remember the same episode as another slot."""
        self.task, self.actions, self.keys = other.task, list(other.actions), list(other.keys)
        self.num_steps, self.in_episode = other.num_steps, other.in_episode
        self.attempts, self.lost = 0, None

    def replays(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Arguments of the `replay` commands that build the environment again, with the keys each must give."""
        assert self.task is not None
        for first in range(0, max(1, self.num_steps), CHUNK):
            last = min(first + CHUNK, self.num_steps)
            start = reset_argument(self.task) if first == 0 else None
            keys = self.keys[first + (first > 0) : last + 1]
            yield [start, self.actions[first:last]], keys


def reset_argument(task: Task) -> list[Any]:
    """The argument of `reset`."""
    return [task.seed, None if task.options is None else dict(task.options)]


def key_of(observation: Any, info: dict[str, Any], *, is_agent: bool) -> Any:
    """What is compared when a state is reached again; None where nothing can be."""
    if is_agent:
        return info.get("state_key")
    if isinstance(observation, str):
        return observation
    try:
        return state_key(observation)
    except UnsupportedTypeError:
        return None


def mismatch(told: Any, keys: list[Any], first: int, *, is_agent: bool) -> str | None:
    """What differs between a replay's answer and the log, or None."""
    if type(told) is not list or len(told) != len(keys):
        return "the worker did not replay every step"
    for index, (given, key) in enumerate(zip(told, keys, strict=True)):
        again = given if is_agent else key_of(given, {}, is_agent=False)
        if again != key:
            return (
                f"the state after {first + index} steps differs from the one before the restart; the environment "
                "does not depend on its seed and actions alone"
            )
    return None
