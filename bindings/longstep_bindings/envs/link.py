"""One worker as its client sees it: a session with it, the logs of its slots, and what is done when it goes down.

A thread watches the worker. When it ends, hangs or falls silent, the thread gets another, has it build the environments
again from their logs, and sends the commands under way again. Meanwhile `send` takes commands as ever; they follow.
"""

from __future__ import annotations

import functools
import logging
import operator
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longstep.commands import EnvResult, ResultBatch, next_command_id
from longstep.errors import (
    DeadlineError,
    EnvError,
    LongstepError,
    SessionLostError,
    UnsupportedTypeError,
)
from longstep_bindings.calls import Encoded
from longstep_bindings.curve import ClientKeys
from longstep_bindings.envs.messages import Columns, failed_columns, read_reply
from longstep_bindings.envs.places import Place
from longstep_bindings.envs.recovery import Journal, mismatch, replays, reset_argument
from longstep_bindings.envs.session import open_session
from longstep_bindings.envs.shares import Share
from longstep_bindings.pending import Pending
from longstep_bindings.rpc import Client
from longstep_bindings.wire import encode_flat

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
    reconnect_timeout_s: float
    """How long a server that is somebody else's may take to be back."""
    open_timeout_s: float
    keys: ClientKeys | None


class Link:
    """A session that outlives its workers. `send` and `take` are called by the client's user, one thread at a time."""

    def __init__(
        self,
        place: Place,
        slots: range,
        settings: LinkSettings,
        wake: Callable[[], None],
        *,
        arrived: dict[int, ResultBatch],
        in_episode: list[bool],
    ) -> None:
        """Begin to get a worker; `wait_ready` says when it is there.

        Args:
            place: Where workers come from.
            slots: Numbers of this link's slots at the client.
            settings: What all links have in common.
            wake: Called when there is something to `take`, or the link has failed.
            arrived: Where results go, by number of their share.
            in_episode: For each slot of the client, whether it may be stepped; kept up to date for this link's.
        """
        self.place, self.slots = place, slots
        self.journal = Journal(in_episode)
        self.num_restarts = 0
        self.failure: LongstepError | None = None
        """Why no command is answered any more; None while all is well."""
        self.traits: dict[str, Any] = {}
        """What the worker said of its environment."""
        self._is_agent = self._takes_one_operation = False
        self._settings, self._wake = settings, wake
        self.arrived, self._in_episode = arrived, in_episode
        self._owner = secrets.randbits(63)
        self._lock = threading.Lock()
        self.client: Client | None = None
        """The session; None while there is none and commands have to wait. Whoever calls `take` may attend to it."""
        self._under_way: dict[int, Share] = {}
        """Shares that were not answered, by number."""
        self.inbox: deque[tuple[Reader, Pending, Share | None]] = deque()
        """Answers that `take` has yet to read."""
        self._lost: dict[int, str] = {}
        """Why the environments of some slots could not be built again; told at their next step."""
        self._attempts: dict[int, int] = {}
        """Times that a worker went down while it executed some slots, since their last answer."""
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

    def send(self, share: Share) -> None:
        """Send commands to the worker, or keep them for the next one."""
        with self._lock:
            self._under_way[share.number] = share
            try:
                if self.client is not None:
                    self._submit(self.client, share)
            except BaseException as error:
                # it may have been sent or not: the next worker is certain to get it once
                self._report(f"sending to it was interrupted by {type(error).__name__}")
                raise

    def slots_under_way(self) -> set[int]:
        """Slots whose commands were taken and have no result yet."""
        with self._lock:
            return {slot for share in self._under_way.values() for slot in share.slots}

    def take(self) -> None:
        """Read the answers that have arrived; their results go into `arrived`."""
        with self._lock:
            while self.inbox:  # an interrupted answer stays, and is read again
                self._read(*self.inbox[0])
                self.inbox.popleft()

    def copy(self, slot: int, into: int) -> EnvResult | None:
        """Have slot `into` stand where `slot` stands, by a snapshot; None when that is not possible now."""
        client = self.client
        if client is None or not self.traits["can_copy"] or slot in self._lost:
            return None
        body = [[into - self.slots.start], ["copy"], [slot - self.slots.start]]
        try:
            columns = read_reply(client.call("run", body, timeout_s=self._limit_s(1, 0)), 1)
        except LongstepError:
            return None
        share = Share([into], [next_command_id()], None, [None])
        results, _ = share.results(columns, is_agent=self._is_agent, lost=self._lost)
        if results.errors != [None]:
            return None
        with self._lock:
            if self.client is not client:  # the copy went down with its worker
                return None
            self.journal.follow(into, slot, share.number)
            self._attempts.pop(into, None)
            self._lost.pop(into, None)
        return results[0]

    def begin_close(self) -> None:
        """Begin to end the session and the worker."""
        self._closing.set()
        self._trouble.set()
        self.place.begin_close()

    def close(self) -> None:
        """Wait for the end."""
        self._thread.join()

    # ---- requests ----

    def _submit(self, client: Client, share: Share) -> None:
        """Send commands in one message, or each in its own when their environments block."""
        num_commands = len(share.slots)
        if (self.traits["blocking"] or self._one_by_one) and num_commands > 1:
            self._submit_singly(client, share)
            return
        num_resets = 0
        operations: str | list[str] = "step"
        arguments = share.actions
        if share.tasks is not None:
            num_resets = num_commands - share.tasks.count(None)
            operations = ["reset" if task else "step" for task in share.tasks]
            arguments = [
                reset_argument(task) if task else action
                for task, action in zip(share.tasks, share.actions, strict=True)
            ]
        elif not self._takes_one_operation:
            operations = ["step"] * num_commands
        first = self.slots.start
        slots = [slot - first for slot in share.slots] if first else share.slots
        limit_s = self._limit_s(num_resets, num_commands - num_resets)
        read = functools.partial(self._results, share)
        body: Any = [slots, operations, arguments]
        try:
            if operations == "step" and set(map(type, arguments)) == {str}:
                body = Encoded(encode_flat(body, client.server.limits))
            self._request(client, body, limit_s, read, share)
        except UnsupportedTypeError as error:
            if num_commands == 1:
                self._finish(share, failed_columns(f"UnsupportedTypeError: {error}", 1))
                self._wake()
            else:
                self._submit_singly(client, share)

    def _submit_singly(self, client: Client, share: Share) -> None:
        shares = share.split()
        self._under_way.update((single.number, single) for single in shares)
        self._under_way.pop(share.number)
        for single in shares:
            self._submit(client, single)

    def _limit_s(self, num_resets: int, num_steps: int) -> float:
        """How long these may take together."""
        traits = self.traits
        return num_resets * traits["reset_timeout_s"] + num_steps * traits["step_timeout_s"]

    def _request(
        self,
        client: Client,
        body: Any,
        limit_s: float,
        read: Reader,
        share: Share | None = None,
    ) -> Pending | None:
        """Send a message; None when the session is lost, which has been reported then."""
        timeout_s = limit_s + (_MARGIN_S if self.traits["has_board"] else 1.0)

        def arrived(pending: Pending) -> None:
            self.inbox.append((read, pending, share))
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

    def _read(self, read: Reader, pending: Pending, share: Share | None) -> None:
        try:
            read(pending.result())
        except (SessionLostError, DeadlineError) as error:
            # what it asked for is still under way, and the next worker gets it
            if isinstance(error, DeadlineError) and share is not None:
                if len(share.slots) == 1:
                    self._late.append(share.slots[0])
                self._one_by_one |= len(share.slots) > 1
            self._report(str(error))
        except LongstepError as error:
            read(error)

    def _results(self, share: Share, value: Any) -> None:
        try:
            if isinstance(value, LongstepError):
                raise value
            columns = read_reply(value, len(share.slots))
        except LongstepError as error:
            columns = failed_columns(f"{type(error).__name__}: {error}", len(share.slots))
        self._finish(share, columns)

    def _finish(self, share: Share, columns: Columns) -> None:
        """Take the answer to a share. Safe to repeat when it was interrupted."""
        if share.number not in self._under_way:
            return
        results, keys = share.results(columns, is_agent=self._is_agent, lost=self._lost)
        failed = [error is not None for error in results.errors] if any(results.errors) else []
        over: list[bool] = []
        if True in results.terminated or True in results.truncated:
            over = list(map(operator.or_, results.terminated, results.truncated))
        told = share.slots, share.tasks, share.actions
        self.journal.add(share.number, *told, keys, failed=failed, over=over)
        for slot in share.slots if self._attempts or self._lost else ():
            self._attempts.pop(slot, None)
            self._lost.pop(slot, None)
        self.arrived[share.number] = results
        del self._under_way[share.number]

    def _check_replay(self, slot: int, keys: list[Any], first: int, value: Any) -> None:
        try:
            if isinstance(value, LongstepError):
                raise value
            columns = read_reply(value, 1)
            told, error = columns.observations[0], columns.errors[0]
            why = error or mismatch(told, keys, first, is_agent=self._is_agent)
        except LongstepError as error:
            why = str(error)
        if why is not None:
            said = f"SessionLostError: the environment was lost with its worker: {why}"
            self._lost.setdefault(slot, said)

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
        client, self.traits = open_session(
            self.place.open(),
            environment=settings.environment,
            num_slots=len(self.slots),
            owner=self._owner,
            connect_timeout_s=settings.connect_timeout_s,
            open_timeout_s=settings.open_timeout_s,
            keys=settings.keys,
            check_there=self._check_there,
        )
        self._is_agent = self.traits["kind"] == "agent"
        self._takes_one_operation = self.traits.get("one_operation") is True
        return client

    def _check_there(self) -> None:
        why = "the client was closed" if self._closing.is_set() else self.place.why_down()
        if why is not None:
            raise SessionLostError(why)

    def _set_client(self, client: Client) -> None:
        """Let commands through, those that waited first."""
        with self._lock:
            self.client = client
            if self._under_way:
                # in one message, for there may be more commands than credits
                share = Share.join(list(self._under_way.values()))
                self._under_way = {share.number: share}
                self._submit(client, share)

    def _drop_client(self) -> None:
        with self._lock:
            client, self.client = self.client, None
        if client is not None:
            client.close()

    def _watch(self) -> str | None:
        """Why the worker is of no more use, once it is; None when this link is closed."""
        while not self._closing.is_set():
            if self._trouble.wait(_WATCH_S) and not self._closing.is_set():
                return self.place.why_down() or self._trouble_text
            client = self.client
            why = self.place.why_down() or (client and client.lost)
            if why is not None:
                return why
        return None

    def _recover(self, why: str) -> None:
        self._drop_client()  # what is unanswered now stays so: nobody writes to the inbox any more
        self.take()  # the answers that came in time tell what was done
        end_at = time.monotonic() + self._settings.reconnect_timeout_s
        is_down = True
        while not self._closing.is_set():
            self.place.drop()
            self._trouble.clear()
            self._trouble_text = ""
            if is_down or self.place.starts:
                self._count_restart(why)
            elif time.monotonic() > end_at:
                raise EnvError(
                    f"expected the server to be back within {self._settings.reconnect_timeout_s:g} s, got {why}; "
                    "restart it, or raise `reconnect_timeout_s`"
                )
            is_down = False
            try:
                client = self._connect()
            except LongstepError as error:
                why = str(error)
                self._closing.wait(_AGAIN_S)
                continue
            self._blame()
            if (trouble := self._rebuild(client)) is None:
                self._set_client(client)
                return
            client.close()
            self.take()  # what became of the replays is no news of the next worker
            why, is_down = trouble, True

    def _count_restart(self, why: str) -> None:
        self.num_restarts += 1
        if self.num_restarts > self._settings.max_restarts:
            raise EnvError(
                f"expected a worker to go down at most {self._settings.max_restarts} times, got one more: {why}; "
                "look for what kills it, or raise `max_restarts`"
            )
        _log.warning("environment worker: %s; it is replaced", why)

    def _blame(self) -> None:
        """Give up what took too many workers down."""
        first = self.slots.start
        late = [(slot, "its step or reset had no answer in time") for slot in self._late]
        self._late.clear()
        with self._lock:
            for slot, why in [*((first + at, why) for at, why in self.traits["suspects"]), *late]:
                attempts = self._attempts[slot] = self._attempts.get(slot, 0) + 1
                if attempts <= self._settings.max_retries:
                    continue
                self._lost[slot] = said = f"EnvError: {why}"
                self._finish_alone(slot, said)
        self._wake()

    def _finish_alone(self, slot: int, error: str) -> None:
        """Answer the command of one slot, if one is under way, with an error; others of its share stay."""
        for share in [share for share in self._under_way.values() if slot in share.slots]:
            singles = share.split()
            self._under_way.update((single.number, single) for single in singles)
            del self._under_way[share.number]
            (single,) = [single for single in singles if single.slots == [slot]]
            self._finish(single, failed_columns(error, 1))

    def _rebuild(self, client: Client) -> str | None:
        """Have the environments in an episode built again; only `send` and `take` may run beside this.

        Returns:
            Why this worker is of no use either; None when it has been told everything.
        """
        asked: deque[Pending] = deque()
        with self._lock:
            shares = list(self._under_way.values())
        waiting = {
            slot
            for share in shares
            for slot, task in zip(share.slots, share.tasks or (), strict=False)
            if task
        }
        wanted = [
            slot
            for slot in self.slots
            if self._in_episode[slot] and slot not in self._lost and slot not in waiting
        ]
        for slot, history in self.journal.histories(wanted).items():
            first = 0
            for argument, keys in replays(history):
                while len(asked) >= _MAX_REPLAYS:  # never wait in `submit`: it does not see a hang
                    why = client.lost or self.place.why_down()
                    if why or self._closing.is_set():
                        return why or "the client was closed"
                    time.sleep(_LOOK_S)
                    while asked and asked[0].is_done:
                        asked.popleft()
                limit_s = self._limit_s(1, len(argument[1]))
                read = functools.partial(self._check_replay, slot, keys, first)
                body = [[slot - self.slots.start], ["replay"], [argument]]
                try:
                    pending = self._request(client, body, limit_s, read)
                except UnsupportedTypeError as error:
                    said = f"UnsupportedTypeError: its actions cannot be sent again: {error}"
                    self._lost[slot] = said
                    break
                if pending is None:
                    return self._trouble_text
                asked.append(pending)
                first += len(keys)
        return None
