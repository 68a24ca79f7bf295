"""What a client remembers of its slots: enough to build their environments again in another worker and to see that they are
equal.

A *history* is a slot's task, the actions that were answered since its reset, and a key for the state after the reset and
after each of them: the state key, or for a raw environment one of its observation. A new worker is told to reset and to
repeat the actions; the keys must come out the same. The command that was under way is then sent again: its effect went
down with the old worker, so it is applied once.

The `Journal` keeps the columns of each answered message as they are, for a message of a thousand steps should cost little
more than one of one. Histories are read out of it when they are needed, which is seldom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

from longstep.errors import UnsupportedTypeError
from longstep.state_key import state_key
from longstep.types import Task

__all__ = ["History", "Journal", "keys_of", "mismatch", "replays", "reset_argument"]

CHUNK = 64
"""Actions in one replay message."""
_NEVER = 1 << 62
"""Later than every message."""
_FEW_ROWS = 8192
"""Rows up to which nothing is thrown away: looking for what can be costs more."""


class History(NamedTuple):
    """How a slot came to stand where it stands."""

    task: Task
    actions: list[Any]
    keys: list[Any]
    """One more than actions."""


class _Entry(NamedTuple):
    """One answered message."""

    slots: list[int]
    tasks: list[Task | None] | None
    actions: list[Any]
    keys: list[Any]

    def pick(self, wanted: list[bool]) -> _Entry:
        """The rows where `wanted` is True."""
        tasks = self.tasks and list(compress(self.tasks, wanted))
        columns = (
            list(compress(column, wanted)) for column in (self.slots, self.actions, self.keys)
        )
        slots, actions, keys = columns
        return _Entry(slots, tasks, actions, keys)


class Journal:
    """The histories of some slots. Messages are numbered in the order in which they were sent."""

    def __init__(self, in_episode: list[bool]) -> None:
        """Args:
        in_episode: Whether each slot's environment may be stepped; kept up to date here.
        """
        self._in_episode = in_episode
        self._begun = [_NEVER] * len(in_episode)
        """The message from which on the rows of each slot are its history."""
        self._before: dict[int, History] = {}
        """What came before that message, of slots that were made to follow another."""
        self._entries: dict[int, _Entry] = {}
        self._num_rows, self._many_rows = 0, _FEW_ROWS

    def add(
        self,
        number: int,
        slots: list[int],
        tasks: list[Task | None] | None,
        actions: list[Any],
        keys: list[Any],
        *,
        failed: Sequence[bool],
        over: Sequence[bool],
    ) -> None:
        """Take an answered message. Safe to repeat when it was interrupted.

        Args:
            number: Of the message.
            slots: Whom it told something.
            tasks: What each was reset to, None where it was stepped; None alone when all were.
            actions: What each was stepped with.
            keys: Of the state that each came to.
            failed: True where the environment is gone; empty when it is nowhere.
            over: True where the episode has ended; empty when it has nowhere.
        """
        self._entries[number] = _Entry(slots, tasks, actions, keys)
        if tasks is not None or failed or over:
            for index, slot in enumerate(slots):
                if failed and failed[index]:
                    self.forget(slot)
                else:
                    if tasks is not None and tasks[index] is not None:
                        self._begun[slot] = number
                        self._before.pop(slot, None)
                    self._in_episode[slot] = not (over and over[index])
        self._num_rows += len(slots)
        if self._num_rows > self._many_rows:
            self._throw_away()

    def forget(self, slot: int) -> None:
        """Take note that a slot's environment is gone."""
        self._begun[slot] = _NEVER
        self._before.pop(slot, None)
        self._in_episode[slot] = False

    def follow(self, slot: int, source: int, number: int) -> None:
        """Give `slot` the history of `source`, up to the message `number`."""
        history = self.history(source)
        if history is None:
            self.forget(slot)
            return
        self._before[slot], self._begun[slot] = history, number
        self._in_episode[slot] = self._in_episode[source]

    def history(self, slot: int) -> History | None:
        """The history of a slot; None if it was not reset, or failed."""
        return self.histories([slot]).get(slot)

    def histories(self, slots: Sequence[int]) -> dict[int, History]:
        """The histories of some slots, of those that have one."""
        begun, found = self._begun, dict[int, History]()
        for slot in slots:
            if (before := self._before.get(slot)) is not None:
                found[slot] = History(before.task, list(before.actions), list(before.keys))
        wanted = {slot for slot in slots if begun[slot] != _NEVER}
        for number, entry in list(self._entries.items()):
            if wanted.isdisjoint(entry.slots):
                continue
            for index, slot in enumerate(entry.slots):
                if slot not in wanted or number < begun[slot]:
                    continue
                task = None if entry.tasks is None else entry.tasks[index]
                if task is not None:
                    found[slot] = History(task, [], [entry.keys[index]])
                else:
                    found[slot].actions.append(entry.actions[index])
                    found[slot].keys.append(entry.keys[index])
        return found

    def _throw_away(self) -> None:
        """Forget the rows of episodes that are no slot's history any more."""
        begun, latest = self._begun, max(self._begun)
        entries: dict[int, _Entry] = {}
        for number, entry in self._entries.items():
            if latest <= number:
                entries[number] = entry
                continue
            begins = list(map(begun.__getitem__, entry.slots))
            if max(begins) <= number:
                entries[number] = entry
            elif min(begins) <= number:
                entries[number] = entry.pick([begin <= number for begin in begins])
        self._entries = entries
        self._num_rows = sum(len(entry.slots) for entry in entries.values())
        self._many_rows = max(_FEW_ROWS, 2 * self._num_rows)


def replays(history: History) -> Iterator[tuple[list[Any], list[Any]]]:
    """Arguments of the `replay` commands that build an environment again, with the keys each must give."""
    task, actions, keys = history
    for first in range(0, max(1, len(actions)), CHUNK):
        last = min(first + CHUNK, len(actions))
        start = reset_argument(task) if first == 0 else None
        yield [start, actions[first:last]], keys[first + (first > 0) : last + 1]


def reset_argument(task: Task) -> list[Any]:
    """The argument of `reset`."""
    return [task.seed, None if task.options is None else dict(task.options)]


def keys_of(observations: Sequence[Any], infos: Sequence[dict[str, Any]] | None) -> list[Any]:
    """What is compared when a state is reached again, of each state; None where nothing can be.

    Args:
        observations: Of raw environments.
        infos: Of agents; None for raw environments.
    """
    if infos is not None:
        return [info.get("state_key") for info in infos]
    try:
        return list(map(xxh3_128_digest, map(str.encode, observations)))
    except TypeError:  # some are no texts
        return list(map(_key_of, observations))


def _key_of(observation: Any) -> bytes | None:
    if type(observation) is str:
        return xxh3_128_digest(observation.encode())
    try:
        return state_key(observation)
    except UnsupportedTypeError:
        return None


def mismatch(told: Any, keys: list[Any], first: int, *, is_agent: bool) -> str | None:
    """What differs between a replay's answer and the history, or None."""
    if type(told) is not list or len(told) != len(keys):
        return "the worker did not replay every step"
    for index, (given, key) in enumerate(zip(told, keys, strict=True)):
        if (given if is_agent else _key_of(given)) != key:
            return (
                f"the state after {first + index} steps differs from the one before the restart; the environment "
                "does not depend on its seed and actions alone"
            )
    return None
