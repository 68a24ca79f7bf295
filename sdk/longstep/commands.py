"""The protocol between a rollout and its environments: commands go in, results come out, matched by id, never by order.

Words: a *slot* is one place for one environment; a *command* resets or steps the environment of one slot. One
environment's exception is that slot's `EnvResult.error` and nobody else's, and the environment is built anew at the
slot's next reset. There is no autoreset: a finished environment rests until it is told to reset.

A *batch* is a sequence of commands or of results that is kept as columns; its records are made when they are looked at.
Whoever steps thousands of environments reads and writes the columns. The names here are public in `longstep.vector`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, overload, runtime_checkable

from longstep.errors import ConfigError
from longstep.types import Task

__all__ = [
    "CommandBatch",
    "EnvCommand",
    "EnvResult",
    "ResultBatch",
    "VectorEnv",
    "check_commands",
    "next_command_id",
]

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


class CommandBatch(Sequence[EnvCommand]):
    """Steps of many slots, as columns.

    >>> commands = CommandBatch([0, 1], ["north", "south"])
    >>> len(commands), commands[1].action
    (2, 'south')
    """

    __slots__ = ("actions", "command_ids", "slots")

    def __init__(self, slots: Sequence[int], actions: Sequence[str]) -> None:
        """Draw an id for each command.

        Args:
            slots: Indices of environments.
            actions: A completion for each.

        Raises:
            ConfigError: The columns differ in length, or a slot is no integer.
        """
        if len(slots) != len(actions):
            raise ConfigError(
                f"expected an action for each of {len(slots)} slots, got {len(actions)}"
            )
        try:
            self.slots = list(map(operator.index, slots))
        except TypeError as error:
            raise ConfigError(f"expected integers as slots: {error}") from None
        self.actions = list(actions)
        self.command_ids = list(itertools.islice(_command_ids, len(self.slots)))

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[EnvCommand]:
        return map(_step_command, self.slots, self.command_ids, self.actions)

    @overload
    def __getitem__(self, index: SupportsIndex) -> EnvCommand: ...
    @overload
    def __getitem__(self, index: slice) -> list[EnvCommand]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> EnvCommand | list[EnvCommand]:
        if isinstance(index, slice):
            return list(self)[index]
        return _step_command(self.slots[index], self.command_ids[index], self.actions[index])


def _step_command(slot: int, command_id: int, action: str) -> EnvCommand:
    return EnvCommand(slot=slot, command_id=command_id, action=action)


class ResultBatch(Sequence[EnvResult]):
    """Results, as columns of one length; each is named as the field of `EnvResult`, in the plural.

    >>> results = ResultBatch.of([])
    >>> len(results), results.rewards
    (0, [])
    """

    __slots__ = (
        "_infos",
        "command_ids",
        "errors",
        "observations",
        "rewards",
        "seconds",
        "slots",
        "terminated",
        "truncated",
    )

    def __init__(
        self,
        slots: list[int],
        command_ids: list[int],
        observations: list[str],
        rewards: list[float],
        terminated: list[bool],
        truncated: list[bool],
        infos: list[dict[str, Any]] | None,
        errors: list[str | None],
        seconds: list[float],
    ) -> None:
        """Keep the columns, which are not copied. `infos` may be None when all are empty."""
        self.slots, self.command_ids, self.observations = slots, command_ids, observations
        self.rewards, self.terminated, self.truncated = rewards, terminated, truncated
        self.errors, self.seconds = errors, seconds
        self._infos: list[dict[str, Any]] | None = infos

    @property
    def infos(self) -> list[dict[str, Any]]:
        """An info for each result."""
        if self._infos is None:
            self._infos = [{} for _ in self.slots]
        return self._infos

    @classmethod
    def of(cls, results: Iterable[EnvResult]) -> ResultBatch:
        """The batch that holds these results."""
        return cls.of_rows([tuple(getattr(result, name) for name in _FIELDS) for result in results])

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[Any, ...]]) -> ResultBatch:
        """The batch of these rows: values in the order of the fields of `EnvResult`."""
        columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)]
        return cls(*(columns or [[] for _ in _FIELDS]))

    @classmethod
    def join(cls, batches: Sequence[ResultBatch]) -> ResultBatch:
        """The results of several batches, in order."""
        if len(batches) == 1:
            return batches[0]
        columns = zip(*(batch._columns() for batch in batches), strict=True)
        joined: list[list[Any]] = [list(itertools.chain(*parts)) for parts in columns]
        return cls(*(joined or [[] for _ in _FIELDS]))

    def _columns(self) -> tuple[list[Any], ...]:
        return (
            self.slots,
            self.command_ids,
            self.observations,
            self.rewards,
            self.terminated,
            self.truncated,
            self.infos,
            self.errors,
            self.seconds,
        )

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[EnvResult]:
        return map(_result, *self._columns())

    @overload
    def __getitem__(self, index: SupportsIndex) -> EnvResult: ...
    @overload
    def __getitem__(self, index: slice) -> ResultBatch: ...
    def __getitem__(self, index: SupportsIndex | slice) -> EnvResult | ResultBatch:
        row: list[Any] = [column[index] for column in self._columns()]
        return ResultBatch(*row) if isinstance(index, slice) else _result(*row)

    def __eq__(self, other: object) -> bool:
        """True for a sequence of equal results in the same order, a list among them."""
        if not isinstance(other, Sequence):
            return False
        theirs: list[Any] = list(other)  # pyright: ignore[reportUnknownArgumentType]
        return list(self) == theirs

    __hash__ = None  # type: ignore[assignment]  # its columns are lists

    def __repr__(self) -> str:
        return f"ResultBatch({list(self)!r})"


_FIELDS = tuple(EnvResult.__dataclass_fields__)
_set_fields: list[Callable[[Any, Any], None]] = [vars(EnvResult)[name].__set__ for name in _FIELDS]
(
    _set_slot,
    _set_command_id,
    _set_observation,
    _set_reward,
    _set_terminated,
    _set_truncated,
    _set_info,
    _set_error,
    _set_seconds,
) = _set_fields


def _result(
    slot: int,
    command_id: int,
    observation: str,
    reward: float,
    terminated: bool,
    truncated: bool,
    info: dict[str, Any],
    error: str | None,
    seconds: float,
) -> EnvResult:
    """An EnvResult at a third of the cost of its constructor, which looks up each field by name."""
    result: Any = object.__new__(EnvResult)
    _set_slot(result, slot)
    _set_command_id(result, command_id)
    _set_observation(result, observation)
    _set_reward(result, reward)
    _set_terminated(result, terminated)
    _set_truncated(result, truncated)
    _set_info(result, info)
    _set_error(result, error)
    _set_seconds(result, seconds)
    return result


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

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> Sequence[EnvResult]:
        """Results that are ready, in any order.

        Args:
            min_ready: Wait for this many, or for all that are under way if those are fewer.
            timeout_s: Longest wait; then what is there is returned, perhaps nothing. None waits for ever.
        """
        ...

    def close(self) -> None:
        """Close every environment. Idempotent."""
        ...


def check_commands(
    commands: Sequence[EnvCommand],
    *,
    busy: AbstractSet[int],
    in_episode: Sequence[bool],
    env_id: str | None,
) -> set[int]:
    """The slots that are busy once `commands` are taken. For who implements a `VectorEnv`.

    Args:
        commands: What was sent.
        busy: Slots that have a command under way.
        in_episode: For each slot, whether its environment may be stepped.
        env_id: What tasks must name; None when any will do.

    Raises:
        ConfigError: Unknown or busy slot, task of another environment, step outside an episode, or not exactly one of
            `task` and `action`.
    """
    if isinstance(commands, CommandBatch) and _can_all_step(commands, busy, in_episode):
        return {*busy, *commands.slots}
    taken = set(busy)
    for command in commands:
        _check_command(command, taken, in_episode, env_id)
        taken.add(command.slot)
    return taken


def _can_all_step(batch: CommandBatch, busy: AbstractSet[int], in_episode: Sequence[bool]) -> bool:
    """The same verdict, column by column; what is wrong is for others to find."""
    slots = batch.slots
    return (
        bool(slots)
        and min(slots) >= 0
        and max(slots) < len(in_episode)
        and len(set(slots)) == len(slots)
        and busy.isdisjoint(slots)
        and all(map(in_episode.__getitem__, slots))
        and None not in batch.actions  # pyright: ignore[reportUnnecessaryContains]
    )


def _check_command(
    command: EnvCommand, busy: AbstractSet[int], in_episode: Sequence[bool], env_id: str | None
) -> None:
    slot = command.slot
    if not 0 <= slot < len(in_episode):
        raise ConfigError(f"expected a slot below {len(in_episode)}, got {slot}")
    if slot in busy:
        raise ConfigError(
            f"expected one command at a time for slot {slot}, got command {command.command_id} while another is "
            "pending; call `recv` first"
        )
    if (command.task is None) == (command.action is None):
        raise ConfigError(
            f"expected exactly one of `task` and `action` in command {command.command_id}, "
            f"got {'neither' if command.task is None else 'both'}"
        )
    if command.task is None and not in_episode[slot]:
        raise ConfigError(
            f"expected slot {slot} to be in an episode at a step, but it was not reset, has finished or has "
            "failed; send a command with `task` first"
        )
    if command.task is not None and env_id not in (None, command.task.env_id):
        raise ConfigError(
            f"expected tasks of `{env_id}`, got one of `{command.task.env_id}`; "
            "a vector environment holds one kind of environment"
        )
