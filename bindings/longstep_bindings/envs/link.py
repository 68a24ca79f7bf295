"""One worker as its client sees it: a session with it, the logs of its slots, and what is done when it goes down.

A thread watches the worker. When it ends, hangs or falls silent, the thread gets another, has it build the environments
again from their logs, and sends the commands under way again. Meanwhile `send` takes commands as ever; they follow.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from longstep.commands import EnvCommand, EnvResult, next_command_id
from longstep.errors import (
    DeadlineError,
    EnvError,
    LongstepError,
    ProtocolError,
    SessionLostError,
    UnsupportedTypeError,
)
from longstep_bindings.curve import ClientKeys
from longstep_bindings.envs.messages import (
    REPLY_LIMITS,
    SERVICE,
    VERSION,
    failed_row,
    read_agent,
    read_reply,
)
from longstep_bindings.envs.places import Place
from longstep_bindings.envs.recovery import SlotLog, key_of, mismatch, reset_argument
from longstep_bindings.pending import Pending
from longstep_bindings.rpc import Client

__all__ = ["Link", "LinkSettings"]

Reader = Callable[[Any], None]
"""Takes the value of an answer, or the error in its place."""

_log = logging.getLogger(__name__)
_WATCH_S = 0.05
_AGAIN_S = 0.2
"""Pause before another start, when one failed."""
_LOOK_S = 0.005
_MAX_REPLAYS = 32
"""Replays under way at a time; fewer than there are credits."""
_MARGIN_S = 60.0
"""Time that a request gets beside what its commands may take, when the worker's board tells who is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What all links of one client have in common."""

    environment: str | None
    """What to ask the worker for; None is the only one it has."""
    max_restarts: int
    """Times that one worker may go down; None of its commands is answered after one more."""
    max_retries: int
    """Times that a command is sent again after it took a worker down."""
    connect_timeout_s: float
    open_timeout_s: float
    keys: ClientKeys | None


class Link:
    """A session that outlives its workers. `send` and `take` are called by the client's user, one thread at a time."""

    def __init__(
        self,
        place: Place,
        first_slot: int,
        num_slots: int,
        settings: LinkSettings,
        wake: Callable[[], None],
    ) -> None:
        """Begin to get a worker; `wait_ready` says when it is there.

        Args:
            place: Where workers come from.
            first_slot: Number of this link's first slot at the client.
            num_slots: Number of its slots.
            settings: What all links have in common.
            wake: Called when there is something to `take`, or the link has failed.
        """
        self.place = place
        self.first_slot, self.num_slots = first_slot, num_slots
        self.logs = [SlotLog() for _ in range(num_slots)]
        self.num_restarts = 0
        self.arrived: dict[int, EnvResult] = {}
        """Where results go, by slot of the client; set by the owner before it sends anything."""
        self.failure: LongstepError | None = None
        """Why no command is answered any more; None while all is well."""
        self.traits: dict[str, Any] = {}
        """What the worker said of its environment."""
        self._is_agent = False
        self._settings, self._wake = settings, wake
        self._owner = secrets.randbits(63)
        self._lock = threading.Lock()
        self._client: Client | None = None
        """The session; None while there is none and commands have to wait."""
        self._inbox: deque[tuple[Reader, Pending, Sequence[EnvCommand]]] = deque()
        self._late: list[int] = []
        """Slots whose command alone was under way in a message that had no answer in time."""
        self._one_by_one = False
        """True to send each command alone, so that it is known which has no answer."""
        self._trouble = threading.Event()
        self._trouble_text = ""
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="longstep-env-link", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the first worker is there; raises what prevents it."""
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    # ---- called by the user of the client ----

    def send(self, commands: Sequence[EnvCommand]) -> None:
        """Send commands to the worker, or keep them for the next one."""
        with self._lock:
            for command in commands:
                self.logs[command.slot - self.first_slot].pending = command
            if self._client is not None:
                self._submit(self._client, commands)

    def take(self) -> None:
        """Read the answers that have arrived; their results go into `arrived`."""
        with self._lock:
            while self._inbox:  # an interrupted answer stays, and is read again
                self._read(*self._inbox[0])
                self._inbox.popleft()

    def copy(self, slot: int, into: int) -> EnvResult | None:
        """Have slot `into` stand where `slot` stands, by a snapshot; None when that is not possible now."""
        client = self._client
        source, target = (self.logs[number - self.first_slot] for number in (slot, into))
        if client is None or not self.traits["can_copy"] or source.lost is not None:
            return None
        body = [[into - self.first_slot], ["copy"], [slot - self.first_slot]]
        try:
            row = read_reply(client.call("run", body, timeout_s=self._limit_s(1, 0)), 1)[0]
        except LongstepError:
            return None
        result, _ = self._result_of(row, EnvCommand(slot=into, command_id=next_command_id()))
        if result.error is not None:
            return None
        with self._lock:
            if self._client is not client:  # the copy went down with its worker
                return None
            target.follow(source)
        return result

    def begin_close(self) -> None:
        """Begin to end the session and the worker."""
        self._closing.set()
        self._trouble.set()
        self.place.begin_close()

    def close(self) -> None:
        """Wait for the end."""
        self._thread.join()

    # ---- requests ----

    def _submit(self, client: Client, commands: Sequence[EnvCommand]) -> None:
        """Send commands in one message, or each in its own when their environments block."""
        if (self.traits["blocking"] or self._one_by_one) and len(commands) > 1:
            for command in commands:
                self._submit(client, [command])
            return
        slots = [command.slot - self.first_slot for command in commands]
        operations = ["reset" if command.task else "step" for command in commands]
        arguments = [
            reset_argument(command.task) if command.task else command.action for command in commands
        ]
        num_resets = operations.count("reset")
        limit_s = self._limit_s(num_resets, len(commands) - num_resets)
        body, read = [slots, operations, arguments], functools.partial(self._results, commands)
        try:
            self._request(client, body, limit_s, read, commands)
        except UnsupportedTypeError as error:
            if len(commands) == 1:
                self._finish(commands[0], failed_row(f"UnsupportedTypeError: {error}"))
                self._wake()
                return
            for command in commands:
                self._submit(client, [command])

    def _limit_s(self, num_resets: int, num_steps: int) -> float:
        """How long these may take together."""
        traits = self.traits
        return num_resets * traits["reset_timeout_s"] + num_steps * traits["step_timeout_s"]

    def _request(
        self,
        client: Client,
        body: list[Any],
        limit_s: float,
        read: Reader,
        commands: Sequence[EnvCommand] = (),
    ) -> Pending | None:
        """Send a message; None when the session is lost, which has been reported then."""
        timeout_s = limit_s + (_MARGIN_S if self.traits["has_board"] else 1.0)

        def arrived(pending: Pending) -> None:
            self._inbox.append((read, pending, commands))
            self._wake()

        try:
            return client.submit("run", body, timeout_s=timeout_s, on_done=arrived)
        except (SessionLostError, DeadlineError) as error:
            self._report(str(error))
            return None

    def _report(self, trouble: str) -> None:
        self._trouble_text = self._trouble_text or trouble
        self._trouble.set()

    # ---- answers, read with the lock held ----

    def _read(self, read: Reader, pending: Pending, commands: Sequence[EnvCommand]) -> None:
        try:
            read(pending.result())
        except (SessionLostError, DeadlineError) as error:
            # what it asked for is still under way, and the next worker gets it
            if isinstance(error, DeadlineError):
                if len(commands) == 1:
                    self._late.append(commands[0].slot - self.first_slot)
                self._one_by_one |= len(commands) > 1
            self._report(str(error))
        except LongstepError as error:
            read(error)

    def _results(self, commands: Sequence[EnvCommand], value: Any) -> None:
        try:
            if isinstance(value, LongstepError):
                raise value
            rows = read_reply(value, len(commands))
        except LongstepError as error:
            failed: tuple[Any, ...] = failed_row(f"{type(error).__name__}: {error}")
            rows = [failed] * len(commands)
        for command, row in zip(commands, rows, strict=True):
            self._finish(command, row)

    def _finish(self, command: EnvCommand, row: tuple[Any, ...]) -> None:
        log = self.logs[command.slot - self.first_slot]
        if log.pending is not command:
            return
        result, key = self._result_of(row, command, log.lost if command.task is None else None)
        self.arrived[command.slot] = result
        log.finish(
            command, key, ok=result.error is None, over=result.terminated or result.truncated
        )

    def _result_of(
        self, row: tuple[Any, ...], command: EnvCommand, lost: str | None = None
    ) -> tuple[EnvResult, Any]:
        """The result that a row tells, and the key of the state it shows; `lost` is an error that comes first."""
        observation, reward, terminated, truncated, info, error, seconds = row
        error, key = error or lost, None
        if error is None:
            try:
                if self._is_agent:
                    observation, info = read_agent(observation, info)
                key = key_of(observation, info, is_agent=self._is_agent)
            except ProtocolError as wrong:
                error = f"ProtocolError: {wrong}"
        if error is not None:
            observation, reward, terminated, truncated, info = "", 0.0, False, False, {}
        result = EnvResult(
            slot=command.slot,
            command_id=command.command_id,
            observation=observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=info,
            error=error,
            seconds=seconds,
        )
        return result, key

    def _check_replay(self, log: SlotLog, keys: list[Any], first: int, value: Any) -> None:
        try:
            if isinstance(value, LongstepError):
                raise value
            told, *_, error, _ = read_reply(value, 1)[0]
            why = error or mismatch(told, keys, first, is_agent=self._is_agent)
        except LongstepError as error:
            why = str(error)
        if why is not None and log.lost is None:
            log.lost = f"SessionLostError: the environment was lost with its worker: {why}"

    # ---- the watching thread ----

    def _run(self) -> None:
        try:
            self._set_client(self._connect())
            self._ready.set()
            while (why := self._watch()) is not None:
                self._recover(why)
        except LongstepError as error:
            self.failure = error
        except Exception as error:
            self.failure = EnvError(f"the thread that watches a worker failed: {error!r}")
            raise
        finally:
            self._ready.set()
            self._wake()
            self._drop_client()
            self.place.begin_close()
            self.place.close()

    def _connect(self) -> Client:
        settings = self._settings
        client = Client(
            self.place.open(),
            service=SERVICE,
            version=VERSION,
            connect_timeout_s=settings.connect_timeout_s,
            keys=settings.keys,
            limits=REPLY_LIMITS,
        )
        order = {
            "environment": settings.environment,
            "num_slots": self.num_slots,
            "owner": self._owner,
        }
        try:
            self.traits = self._opened(client, order)
            self._is_agent = self.traits["kind"] == "agent"
        except BaseException:
            client.close()
            raise
        return client

    def _opened(self, client: Client, order: dict[str, Any]) -> dict[str, Any]:
        limit_s = self._settings.open_timeout_s
        try:
            return _check_traits(client.call("open", order, timeout_s=limit_s), self.num_slots)
        except DeadlineError as error:
            raise DeadlineError(
                f"expected the first environment within {limit_s:g} s: {error}; allow more, or look for what it "
                "waits for"
            ) from None

    def _set_client(self, client: Client) -> None:
        """Let commands through, those that waited first."""
        with self._lock:
            self._client = client
            waiting = [log.pending for log in self.logs if log.pending is not None]
            if waiting:
                self._submit(client, waiting)

    def _drop_client(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _watch(self) -> str | None:
        """Why the worker is of no more use, once it is; None when this link is closed."""
        while not self._closing.is_set():
            if self._trouble.wait(_WATCH_S) and not self._closing.is_set():
                return self.place.why_down() or self._trouble_text
            client = self._client
            why = self.place.why_down() or (client and client.lost)
            if why is not None:
                return why
        return None

    def _recover(self, why: str) -> None:
        self._drop_client()  # what is unanswered now stays so: nobody writes to the inbox any more
        self.take()  # the answers that came in time tell what was done
        while not self._closing.is_set():
            self.place.drop()
            self._trouble.clear()
            self._trouble_text = ""
            self.num_restarts += 1
            if self.num_restarts > self._settings.max_restarts:
                raise EnvError(
                    f"expected a worker to go down at most {self._settings.max_restarts} times, got one more: {why}; "
                    "look for what kills it, or raise `max_restarts`"
                )
            _log.warning("environment worker: %s; it is replaced", why)
            try:
                client = self._connect()
            except LongstepError as error:
                why = str(error)
                self._closing.wait(_AGAIN_S)
                continue
            self._blame()
            self._rebuild(client)
            self._set_client(client)
            return

    def _blame(self) -> None:
        """Give up what took too many workers down."""
        late = [(slot, "its step or reset had no answer in time") for slot in self._late]
        self._late.clear()
        with self._lock:
            for number, why in [*self.traits["suspects"], *late]:
                log = self.logs[number]
                log.attempts += 1
                if log.attempts <= self._settings.max_retries:
                    continue
                log.lost = f"EnvError: {why}"
                if log.pending is not None:
                    self._finish(log.pending, failed_row(log.lost))
        self._wake()

    def _rebuild(self, client: Client) -> None:
        """Have the environments in an episode built again; only `send` and `take` may run beside this."""
        asked: deque[Pending] = deque()
        for slot, log in enumerate(self.logs):
            waits_for_reset = log.pending is not None and log.pending.task is not None
            if not log.in_episode or log.lost is not None or waits_for_reset:
                continue
            first = 0
            for argument, keys in log.replays():
                while len(asked) >= _MAX_REPLAYS:  # never wait in `submit`: it does not see a hang
                    if client.lost or self.place.why_down() or self._closing.is_set():
                        return
                    time.sleep(_LOOK_S)
                    while asked and asked[0].is_done:
                        asked.popleft()
                limit_s = self._limit_s(1, len(argument[1]))
                read = functools.partial(self._check_replay, log, keys, first)
                try:
                    pending = self._request(client, [[slot], ["replay"], [argument]], limit_s, read)
                except UnsupportedTypeError as error:
                    log.lost = f"UnsupportedTypeError: its actions cannot be sent again: {error}"
                    break
                asked.extend([pending] if pending else [])
                first += len(keys)


def _check_traits(traits: Any, num_slots: int) -> dict[str, Any]:
    """What a worker says of its environments, checked."""
    with suppress(TypeError, KeyError, ValueError):
        fits = traits["kind"] in ("agent", "raw") and all(
            type(traits[name]) is bool for name in ("blocking", "has_board", "can_copy")
        )
        limits = [float(traits[name]) for name in ("step_timeout_s", "reset_timeout_s")]
        suspects = traits["suspects"]
        known = all(slot in range(num_slots) and type(why) is str for slot, why in suspects)
        if fits and known and all(0.0 < limit < 1e7 for limit in limits):
            return traits
    raise ProtocolError("expected the traits of an environment in answer to `open`")
