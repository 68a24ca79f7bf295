"""Shares: the commands that travel to one worker in one message, and what the answer to it tells of them.

All that crosses in a message is in columns, one row a command: a thousand steps should cost little more than one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from longstep.commands import CommandBatch, EnvCommand, ResultBatch
from longstep.errors import ProtocolError
from longstep.types import Task
from longstep_bindings.envs.messages import Columns, read_agent
from longstep_bindings.envs.recovery import keys_of

__all__ = ["Share", "next_share_number"]

_numbers = itertools.count(1)


def next_share_number() -> int:
    """A number that no other share of this process has; later ones are higher."""
    return next(_numbers)


class Share:
    """Commands for one worker that travel in one message, as columns. A message has one answer, for all of them."""

    __slots__ = ("actions", "command_ids", "number", "slots", "tasks")

    def __init__(
        self,
        slots: list[int],
        command_ids: list[int],
        tasks: list[Task | None] | None,
        actions: list[Any],
    ) -> None:
        """Args:
        slots: Of the client.
        command_ids: One for each slot.
        tasks: What each is reset to, None where it is stepped; None alone when all are.
        actions: What each is stepped with.
        """
        self.number = next(_numbers)
        self.slots, self.command_ids, self.tasks, self.actions = slots, command_ids, tasks, actions

    @classmethod
    def of(cls, commands: Sequence[EnvCommand]) -> Share:
        """The share of some commands."""
        if isinstance(commands, CommandBatch):
            # copies: the caller has the batch and may change it
            return cls(
                list(commands.slots), list(commands.command_ids), None, list(commands.actions)
            )
        tasks = [command.task for command in commands]
        return cls(
            [
                operator.index(command.slot) for command in commands
            ],  # numpy's integers are no plain ones
            [command.command_id for command in commands],
            None if tasks.count(None) == len(tasks) else tasks,
            [command.action for command in commands],
        )

    def pick(self, wanted: list[bool]) -> Share | None:
        """The commands where `wanted` is True; None if there are none."""
        if True not in wanted:
            return None
        slots, command_ids, actions = (
            list(itertools.compress(column, wanted))
            for column in (self.slots, self.command_ids, self.actions)
        )
        tasks = None if self.tasks is None else list(itertools.compress(self.tasks, wanted))
        return Share(slots, command_ids, tasks, actions)

    @classmethod
    def join(cls, shares: Sequence[Share]) -> Share:
        """The commands of several."""
        return cls(
            [slot for share in shares for slot in share.slots],
            [number for share in shares for number in share.command_ids],
            [task for share in shares for task in share.tasks or [None] * len(share.slots)],
            [action for share in shares for action in share.actions],
        )

    def split(self) -> list[Share]:
        """A share for each command."""
        tasks = self.tasks or [None] * len(self.slots)
        rows = zip(self.slots, self.command_ids, tasks, self.actions, strict=True)
        return [Share([slot], [number], [task], [action]) for slot, number, task, action in rows]

    def results(
        self, columns: Columns, *, is_agent: bool, lost: Mapping[int, str]
    ) -> tuple[ResultBatch, list[Any]]:
        """The results that the answer's columns tell, and the keys of the states they show.

        Args:
            columns: Of the answer, one row a command; they are used up.
            is_agent: True when the environments give prompts.
            lost: Why the environments of some slots are gone; what is said of them is an error unless they were reset.
        """
        observations, rewards, terminated, truncated, infos, errors, seconds = columns
        if lost:
            why_lost = map(lost.get, self.slots)
            tasks = self.tasks or itertools.repeat(None)
            errors = [
                error or (None if task else why)
                for error, why, task in zip(errors, why_lost, tasks, strict=False)
            ]
        if is_agent and infos is None:
            infos = [{} for _ in observations]
        if is_agent and infos is not None:
            for index, (text, info) in enumerate(zip(observations, infos, strict=True)):
                if errors[index] is None:
                    try:
                        observations[index], infos[index] = read_agent(text, info)
                    except ProtocolError as wrong:
                        errors[index] = f"ProtocolError: {wrong}"
        for index, error in enumerate(errors) if any(errors) else ():
            if error is not None:
                observations[index], rewards[index] = "", 0.0
                terminated[index] = truncated[index] = False
                if infos is not None:
                    infos[index] = {}
        keys = keys_of(observations, infos if is_agent else None)
        told = (observations, rewards, terminated, truncated, infos, errors, seconds)
        return ResultBatch(list(self.slots), self.command_ids, *told), keys
