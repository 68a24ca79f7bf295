"""The environment service: what a worker does for its clients. `messages` describes what travels.

Each client (a session) opens slots of one of the environments that the worker was started with. Environments that do not
block run one after the other in the thread that calls `run`; a blocking one has a thread of its own, from its making to
its closing, and its command waits for no other.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, DataError, LongstepError, RegistryError, did_you_mean
from longstep_bindings.calls import LATER, Call, Encoded, Session
from longstep_bindings.envs.board import Board
from longstep_bindings.envs.messages import SERVICE, VERSION, Row, encode_rows
from longstep_bindings.envs.slots import Slot, can_copy, steps
from longstep_bindings.envs.spec import EnvSpec

__all__ = ["EnvService", "Suspect"]

MAX_SLOTS = 1024
"""Most slots of one client."""
_OPERATIONS = frozenset(("step", "reset", "replay", "copy"))
_CLOSE_S = 10.0
"""How long an environment may take to close."""
_JOIN_S = 1.0

Suspect = tuple[int, int, str]
"""What a worker's predecessor was executing when it went down: owner, slot and why it went."""


class EnvService:
    """Serves the environments of some specs."""

    name, version = SERVICE, VERSION

    def __init__(
        self,
        specs: Mapping[str, EnvSpec],
        board: Board,
        *,
        step_timeout_s: float,
        reset_timeout_s: float,
        suspects: Sequence[Suspect] = (),
    ) -> None:
        """Args:
        specs: What clients may ask for, by name.
        board: Where to write what is executed.
        step_timeout_s: Seconds that a step may take.
        reset_timeout_s: Seconds that making and resetting an environment may take.
        suspects: Told to their owners when they open their slots again.
        """
        self._specs, self._board = dict(specs), board
        self._timeouts = {"step_timeout_s": step_timeout_s, "reset_timeout_s": reset_timeout_s}
        self._suspects = tuple(suspects)
        self.methods: Mapping[str, Callable[[Call], Any]] = {"open": self.open, "run": self.run}

    def open(self, call: Call) -> Any:
        """Make the session's slots, and the first environment, so that what is wrong with it is said at once."""
        name, num_slots, owner, compact = _open_arguments(call.value)
        if call.session.state is not None:
            raise ConfigError("expected one `open` in a session, got a second one")
        spec = self._find(name)
        kind = _ThreadedSlots if spec.blocking else _SlotsInTurn
        call.session.state = slots = kind(
            spec, num_slots, owner, self._board, self._timeouts, compact=compact
        )
        told = {
            "environment": name or spec.name,
            "env_id": spec.env_id,
            "blocking": spec.blocking,
            "has_board": True,
            "one_operation": True,
            "suspects": [[slot, why] for whose, slot, why in self._suspects if whose == owner],
            **self._timeouts,
        }
        return slots.open(call, told)

    def _find(self, name: str | None) -> EnvSpec:
        if name is None and len(self._specs) == 1:
            return next(iter(self._specs.values()))
        if name not in self._specs:
            raise RegistryError(
                f"expected an environment that this server has, got `{name}`; "
                f"{did_you_mean(str(name), self._specs)}"
            )
        return self._specs[name]

    def run(self, call: Call) -> Any:
        """Execute commands."""
        slots = call.session.state
        if slots is None:
            raise ConfigError("expected `open` before `run` in a session")
        return slots.run(call, _run_arguments(call.value, len(slots.slots)))

    def close_session(self, session: Session) -> None:
        """Close the session's environments."""
        if session.state is not None:
            session.state.close()


Commands = tuple[list[int], list[str], list[Any]]
"""Slots, operations and arguments, of one length."""


class _SlotsInTurn:
    """Slots whose commands run one after the other, in the thread that calls."""

    def __init__(
        self,
        spec: EnvSpec,
        num_slots: int,
        owner: int,
        board: Board,
        timeouts: Mapping[str, float],
        *,
        compact: bool,
    ) -> None:
        self._board, self._line = board, board.new_line(owner)
        self._compact = compact
        self.slots = [Slot(number, spec, self._line, **timeouts) for number in range(num_slots)]

    def open(self, call: Call, told: dict[str, Any]) -> Any:
        try:
            return told | _traits(self.slots[0].build())
        finally:
            self._line.end()

    def run(self, call: Call, commands: Commands) -> Any:
        slots, (numbers, operations, arguments) = self.slots, commands
        if operations.count("step") == len(operations):
            rows = list(steps(zip(map(slots.__getitem__, numbers), arguments, strict=True)))
        else:
            rows = [
                slots[number].copy(slots[argument])
                if operation == "copy"
                else slots[number].execute(operation, argument)
                for number, operation, argument in zip(*commands, strict=True)
            ]
        self._line.end()
        return Encoded(encode_rows(rows, compact=self._compact))

    def close(self) -> None:
        for slot in self.slots:
            self._line.begin(slot.number, time.monotonic() + _CLOSE_S)
            slot.discard()
        self._board.release(self._line)


class _ThreadedSlots:
    """Slots with a thread each."""

    def __init__(
        self,
        spec: EnvSpec,
        num_slots: int,
        owner: int,
        board: Board,
        timeouts: Mapping[str, float],
        *,
        compact: bool,
    ) -> None:
        self._board, self._compact = board, compact
        self._lines = [board.new_line(owner) for _ in range(num_slots)]
        self.slots = [
            Slot(number, spec, line, **timeouts) for number, line in enumerate(self._lines)
        ]
        self._jobs: list[queue.SimpleQueue[Callable[[], None] | None]] = [
            queue.SimpleQueue() for _ in range(num_slots)
        ]
        self._threads: list[threading.Thread | None] = [None] * num_slots

    def _post(self, slot: int, job: Callable[[], None]) -> None:
        if self._threads[slot] is None:
            name = f"longstep-env-{slot}"
            thread = threading.Thread(target=self._work, args=(slot,), name=name, daemon=True)
            self._threads[slot] = thread
            thread.start()
        self._jobs[slot].put(job)

    def _work(self, slot: int) -> None:
        line = self._lines[slot]
        while (job := self._jobs[slot].get()) is not None:
            job()
            line.end()
        line.begin(slot, time.monotonic() + _CLOSE_S)
        self.slots[slot].discard()
        line.end()

    def open(self, call: Call, told: dict[str, Any]) -> Any:
        def build() -> None:
            try:
                call.reply(told | _traits(self.slots[0].build()))
            except Exception as error:
                call.fail(error)

        self._post(0, build)
        return LATER

    def run(self, call: Call, commands: Commands) -> Any:
        num_commands = len(commands[0])
        rows: list[Row | None] = [None] * num_commands
        lock, left = threading.Lock(), [num_commands]

        def execute(index: int, number: int, operation: str, argument: Any) -> None:
            slot = self.slots[number]
            if operation == "copy":
                rows[index] = slot.copy(self.slots[argument])
            else:
                rows[index] = slot.execute(operation, argument)
            with lock:
                left[0] -= 1
                is_last = not left[0]
            if is_last:
                self._reply(call, [row for row in rows if row is not None])

        for index, command in enumerate(zip(*commands, strict=True)):
            self._post(command[0], lambda index=index, command=command: execute(index, *command))
        return LATER

    def _reply(self, call: Call, rows: list[Row]) -> None:
        try:
            call.reply(Encoded(encode_rows(rows, compact=self._compact)))
        except LongstepError as error:
            call.fail(error)

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for thread, line in zip(self._threads, self._lines, strict=True):
            if thread is not None:
                thread.join(_JOIN_S)
            if thread is None or not thread.is_alive():
                self._board.release(line)


def _traits(env: Any) -> dict[str, Any]:
    kind = "agent" if isinstance(env, LLMAgentEnv) else "raw"
    return {"kind": kind, "can_copy": can_copy(env)}


def _open_arguments(value: Any) -> tuple[str | None, int, int, bool]:
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        name, num_slots, owner = value["environment"], value["num_slots"], value["owner"]
        compact = value.get("compact_columns", False)
        fits = isinstance(name, str | None) and type(num_slots) is int and type(owner) is int
        fits = fits and type(compact) is bool
        if fits and 1 <= num_slots <= MAX_SLOTS and 0 <= owner < 1 << 63:
            return name, num_slots, owner, compact
    raise DataError(
        f"expected `environment`, `num_slots` from 1 to {MAX_SLOTS} and `owner` at `open`"
    )


def _run_arguments(value: Any, num_slots: int) -> Commands:
    if type(value) is not list or len(value) != 3:
        raise DataError("expected [slots, operations, arguments] at `run`")
    slots, said, arguments = cast(list[Any], value)
    told: Any = [said] if type(said) is str else said  # the different operations at least
    if not type(slots) is type(told) is type(arguments) is list:
        raise DataError("expected [slots, operations, arguments] at `run`")
    if set(map(type, told)) != {str} or not _OPERATIONS.issuperset(told):
        raise DataError(f"expected operations among {sorted(_OPERATIONS)} at `run`")
    operations = told * len(slots) if told is not said else told
    if not len(slots) == len(operations) == len(arguments) > 0:
        raise DataError("expected three columns of one length at `run`")
    if set(map(type, slots)) != {int} or min(slots) < 0 or max(slots) >= num_slots:
        raise DataError(f"expected slots from 0 to {num_slots - 1} at `run`")
    if "copy" in operations:
        for operation, argument in zip(operations, arguments, strict=True):
            if operation == "copy" and (type(argument) is not int or not 0 <= argument < num_slots):
                raise DataError(f"expected a slot from 0 to {num_slots - 1} as argument of `copy`")
    return slots, operations, arguments
