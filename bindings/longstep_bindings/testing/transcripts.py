"""Transcripts: everything an environment said, to be compared between two runs."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from longstep.commands import EnvCommand, EnvResult, VectorEnv, next_command_id
from longstep.errors import DeadlineError, EnvError
from longstep.types import Task

__all__ = ["Line", "choose_at_random", "play"]

Line = tuple[str, str, float, bool, bool, str, str | None]
"""What was said and what came of it: action (empty at a reset), observation, reward, terminated, truncated, a digest of
the info, error."""
Choose = Callable[[EnvResult, random.Random], str]


def choose_at_random(result: EnvResult, draws: random.Random) -> str:
    """One of the completions that are allowed after `result`; `no` where anything is."""
    allowed = result.info.get("allowed_completions")
    return draws.choice(allowed) if allowed else "no"


def play(
    envs: VectorEnv,
    tasks: Sequence[Task],
    num_steps: int,
    *,
    choose: Choose = choose_at_random,
    timeout_s: float | None = None,
) -> list[list[Line]]:
    """The transcript of each slot: `num_steps` commands in `tasks[slot]`, which begins again when it is over.

    No slot waits for another. The n-th episode of a slot has the task's seed plus n thousand.

    Args:
        envs: In process or remote; as many slots as there are tasks. Stays open.
        tasks: One for each slot, with a seed.
        num_steps: Commands for each slot, resets included.
        choose: The completion after a result, given draws that are the same in each run.
        timeout_s: Longest wait for a result.

    Raises:
        DeadlineError: No result came in time.
        EnvError: A result came that nobody asked for, or came twice.
    """
    slots = [_Slot(slot, task) for slot, task in enumerate(tasks)]
    asked = {slot.number: slot.next_command(choose) for slot in slots}
    envs.send(list(asked.values()))
    while asked:
        began = time.monotonic()
        results = envs.recv(1, timeout_s)
        if not results:
            raise DeadlineError(
                f"expected a result within {timeout_s} s, got none for slots {sorted(asked)} in "
                f"{time.monotonic() - began:.1f} s"
            )
        for result in results:
            command = asked.pop(result.slot, None)
            if command is None or command.command_id != result.command_id:
                raise EnvError(f"expected the result of {command}, got one of {result.command_id}")
            slots[result.slot].take(command, result)
        commands = [
            slots[result.slot].next_command(choose)
            for result in results
            if len(slots[result.slot].lines) < num_steps
        ]
        asked.update({command.slot: command for command in commands})
        if commands:
            envs.send(commands)
    return [slot.lines for slot in slots]


class _Slot:
    """One slot at play."""

    def __init__(self, number: int, task: Task) -> None:
        self.number, self.lines = number, list[Line]()
        self._task, self._num_episodes = task, 0
        self._draws = random.Random(f"{number} {task.seed}")
        self._last: EnvResult | None = None
        """The state to act in; None when a reset is due."""

    def next_command(self, choose: Choose) -> EnvCommand:
        if self._last is not None:
            action = choose(self._last, self._draws)
            return EnvCommand(slot=self.number, command_id=next_command_id(), action=action)
        assert self._task.seed is not None
        task = replace(self._task, seed=self._task.seed + 1000 * self._num_episodes)
        self._num_episodes += 1
        return EnvCommand(slot=self.number, command_id=next_command_id(), task=task)

    def take(self, command: EnvCommand, result: EnvResult) -> None:
        flags = (result.reward, result.terminated, result.truncated)
        line = (
            command.action or "",
            result.observation,
            *flags,
            _digest(result.info),
            result.error,
        )
        self.lines.append(line)
        is_over = result.terminated or result.truncated or result.error is not None
        self._last = None if is_over else result


def _digest(info: dict[str, Any]) -> str:
    text = repr(sorted(info.items(), key=lambda item: item[0]))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
