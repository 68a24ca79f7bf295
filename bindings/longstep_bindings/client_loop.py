"""The client's side of the socket: it numbers the requests, takes the answers and repairs what was lost.

Whoever calls sends, under a lock that guards socket and books. Answers are taken by the client's own thread, unless
somebody *attends*: waits on `descriptor` and calls `take_answers` when something may be there. Then that thread only keeps
the time, and looks at the socket ten times a second in case its attendant is busy elsewhere. A message so costs its
receiver one switch of threads and not two. Callers hear of their answers once the lock is released.

Repair needs no timer per request. Each heartbeat says which requests are unanswered; the server sends kept answers
again, and its reply says which requests it has. What was sent before the heartbeat and is not there was lost, and is
sent again under its number. That is also how a thread recovers which was interrupted in the middle of a message.

The socket has no fixed identity: each connection gets a fresh one from the server's socket, so a reconnect is never
mistaken for the dead connection before it. Who we are is the session token, 16 random bytes made per client.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from longstep.errors import (
    ConfigError,
    DeadlineError,
    LongstepError,
    ProtocolError,
    SessionLostError,
)
from longstep_bindings.curve import ClientKeys, use_client_keys
from longstep_bindings.failures import Failure, raisable
from longstep_bindings.heads import Head, Kind, pack_head, unpack_head
from longstep_bindings.limits import Limits
from longstep_bindings.pending import Pending
from longstep_bindings.transport import (
    Poller,
    descriptor,
    has_message,
    prepare,
    receive,
    send,
)
from longstep_bindings.waker import Waker

__all__ = ["Attendance", "ClientLoop", "Welcome"]

_TICK_S = 0.1
_HELLO_AGAIN_S = 0.5
_GRACE_S = 0.5
"""How long after a deadline the server's own report of it is waited for."""
_GOODBYE_MS = 200
_QUEUE_LENGTH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """A server's side of the handshake."""

    methods: tuple[str, ...]
    pid: int
    num_credits: int
    heartbeat_s: float
    lost_after_s: float
    limits: Limits
    """Largest message the server takes in."""

    @classmethod
    def read(cls, terms: dict[str, Any]) -> Welcome:
        """The checked terms of a WELCOME; unknown ones are passed over, for later versions."""
        try:
            counts = {name: terms[name] for name in ("pid", "num_credits")}
            milliseconds = {name: terms[f"{name}_ms"] for name in ("heartbeat", "lost_after")}
            limits = {name: terms["limits"][name] for name in Limits.__dataclass_fields__}
            methods = tuple(terms["methods"])
            numbers = [*counts.values(), *milliseconds.values(), *limits.values()]
            if any(type(number) is not int or not 0 < number < 1 << 53 for number in numbers):
                raise ProtocolError("expected positive integers as terms")
            if counts["num_credits"] > 4096 or any(type(name) is not str for name in methods):
                raise ProtocolError("expected at most 4096 credits, and method names")
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"expected complete terms in WELCOME, got {error!r:.80}") from None
        seconds = {f"{name}_s": value / 1000 for name, value in milliseconds.items()}
        return cls(methods=methods, **counts, **seconds, limits=Limits(**limits))


class Attendance:
    """Whether a thread waits for the answers of some clients, and will take them.

    Once this is on and before it waits, that thread asks `has_answers`.
    """

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        """Off."""
        self.is_on = False


class ClientLoop:
    """Between the calling threads and the socket."""

    def __init__(
        self, address: str, hello: dict[str, Any], keys: ClientKeys | None, limits: Limits
    ) -> None:
        """Args:
        address: The server's address.
        hello: What the handshake asks for.
        keys: CURVE keys, or None.
        limits: Largest message taken in.
        """
        self.limits = limits
        self.lost: str | None = None
        """Why no request can be made any more; None while all is well."""
        self._address = address
        self._hello = hello
        self._token = secrets.token_bytes(16)
        self._welcome: Welcome | None = None
        self._refusal: LongstepError | None = None
        self._ready = threading.Event()
        self._closing = threading.Event()
        self.attendance: Attendance | None = None
        """Says when somebody waits on `descriptor`; None when nobody ever does."""
        self._lock = threading.RLock()
        self._open: dict[int, Pending] = {}
        self._outbox: deque[list[bytes]] = deque()
        self._finished: deque[tuple[Pending, list[bytes | memoryview] | LongstepError]] = deque()
        """Answers that their callers have yet to hear of."""
        self._telling = threading.Lock()
        self._seq = self._ping_number = 0
        self._heard_at = self._hello_at = self._ping_at = 0.0
        self._is_touched = False
        """Whether the socket was used, and may have a message of which `descriptor` does not tell."""
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        prepare(self._socket, address, limits, queue_length=_QUEUE_LENGTH)
        self._socket.setsockopt(
            zmq.IMMEDIATE, 1
        )  # nothing is queued for a server that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.descriptor = descriptor(self._socket)
        """Readable when an answer may be there."""
        self._thread = threading.Thread(target=self._run, name="longstep-rpc-client", daemon=True)
        try:
            if keys:
                use_client_keys(self._socket, keys)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._free()
            raise ConfigError(
                f"expected an address to connect to, got `{address}`: {error}"
            ) from None

    # ---- called by any thread ----

    def connect(self, timeout_s: float) -> Welcome:
        """Start the thread and wait for the server's welcome."""
        self._thread.start()
        self._ready.wait(timeout_s)
        if self._refusal is not None:
            raise self._refusal
        if self._welcome is None:
            raise DeadlineError(
                f"expected a server at {self._address} within {timeout_s:g} s, got no answer; "
                "it does not run, or does not know this client's key"
            )
        return self._welcome

    def request(self, pending: Pending) -> None:
        """Send a request."""
        with self._lock:
            if self.lost is None:
                self._send_request(pending)
                self._is_touched = True
                if self.attendance is None or self.attendance.is_on:
                    self._leave_socket()
                return
        pending.finish(SessionLostError(self.lost))

    def withdraw(self, pending: Pending) -> None:
        """Cancel a request."""
        with self._lock:
            if pending.seq in self._open:
                self._post([pack_head(Kind.CANCEL, self._token, pending.seq)])
                self._finish(pending, LongstepError(f"`{pending.method}` was withdrawn"))
            self._leave_socket()

    def _leave_socket(self) -> None:
        """Have the thread do what is left to do, and look for what this use of the socket may have kept from others."""
        if (
            self._finished
            or self._outbox
            or (not self._socket.closed and has_message(self._socket))
        ):
            self._waker.wake()

    def has_answers(self) -> bool:
        """Whether there is something that the descriptor does not tell of; for who attends, before it waits."""
        if not self._is_touched:
            return False
        with self._lock:
            self._is_touched = False
            return not self._socket.closed and has_message(self._socket)

    def take_answers(self) -> None:
        """Take a message; for who attends, once there should be one. Who waits for it is told before this returns."""
        with self._lock:
            if not self._socket.closed:
                if self._outbox:
                    self._flush()
                self._is_touched = True
                self._take_message()
        self._tell()

    def close(self) -> None:
        """End the thread and free the socket."""
        self._closing.set()
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        elif not self._socket.closed:
            self._free()

    # ---- the loop ----

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            with self._lock:
                self._lose(f"the client's thread failed: {error!r}")
            raise
        finally:
            with self._lock:
                self._lose("this client was closed")
                self._outbox.clear()
                self._post([pack_head(Kind.BYE, self._token, "closed")])
                self._free()
            self._tell()

    def _free(self) -> None:
        self._socket.close(linger=_GOODBYE_MS if self._welcome else 0)
        self._context.term()
        self._waker.close()

    def _loop(self) -> None:
        alone, beside = Poller(self._waker, self.descriptor), Poller(self._waker)
        while not self._closing.is_set():
            with self._lock:
                self._flush()
                self._take_messages()
                self._keep_time(time.monotonic())
            self._tell()
            is_attended = self.attendance is not None and self.attendance.is_on
            (beside if is_attended else alone).wait(_TICK_S)

    def _tell(self) -> None:
        """Tell callers of their answers, without the lock, for what they do then is theirs."""
        while self._finished:
            with self._telling:  # an interrupted one stays, and is told again
                if self._finished:
                    pending, answer = self._finished[0]
                    pending.finish(answer)
                    self._finished.popleft()

    def _keep_time(self, now: float) -> None:
        if self.lost is not None:
            return
        if self._welcome is None:
            if now - self._hello_at > _HELLO_AGAIN_S and not self._outbox:
                self._hello_at = now
                self._post([pack_head(Kind.HELLO, self._token, self._hello)])
            return
        if now - self._ping_at >= self._welcome.heartbeat_s and not self._outbox:
            self._ping_at = now
            self._ping_number += 1
            fields = (self._ping_number, self._seq, list(self._open))
            self._post([pack_head(Kind.PING, self._token, *fields)])
        if now - self._heard_at > self._welcome.lost_after_s:
            self._lose(f"no sign of life from {self._address} for {self._welcome.lost_after_s:g} s")
        for pending in [p for p in self._open.values() if now > p.deadline + _GRACE_S]:
            said = f"`{pending.method}` got no answer from {self._address} within its deadline"
            self._finish(pending, DeadlineError(said))

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        for pending in list(self._open.values()):
            self._finish(pending, SessionLostError(self.lost))

    # ---- sending ----

    def _send_request(self, pending: Pending) -> None:
        if not pending.seq:
            self._seq += 1
            pending.seq = self._seq
            self._open[self._seq] = pending
        pending.ping_number = self._ping_number
        remaining_ms = max(0, int((pending.deadline - time.monotonic()) * 1000))
        fields = (pending.seq, self._seq, list(self._open), remaining_ms, pending.method)
        self._post([pack_head(Kind.REQUEST, self._token, *fields), *pending.frames])

    def _post(self, frames: list[bytes]) -> None:
        if self._outbox:
            self._flush()
        if not self._outbox:
            try:
                send(self._socket, frames)
                return
            except zmq.Again:
                pass
        self._outbox.append(frames)

    def _flush(self) -> None:
        while self._outbox:
            try:
                send(self._socket, self._outbox[0])
            except zmq.Again:
                return
            self._outbox.popleft()

    # ---- receiving ----

    def _take_messages(self) -> None:
        for _ in range(100):  # then look at the time again
            if not has_message(self._socket):
                return
            self._take_message()
        self._waker.wake()  # there may be more

    def _take_message(self) -> None:
        """Take one message, if there is one."""
        try:
            _, frames = receive(self._socket, self.limits, routed=False)
            head = unpack_head(bytes(frames[0]))
        except zmq.Again:
            return
        except ProtocolError as error:
            self._refuse(error)
            return
        if head.token == self._token:
            self._heard_at = time.monotonic()
            self._read_message(head, frames[1:])

    def _read_message(self, head: Head, frames: list[bytes | memoryview]) -> None:
        if head.kind is Kind.REPLY or head.kind is Kind.ERROR:
            pending = self._open.get(head.fields[0])
            if pending is not None and head.kind is Kind.REPLY:
                self._finish(pending, frames)
            elif pending is not None:
                self._finish(pending, raisable(Failure(*head.fields[1:]), self._address))
        elif head.kind is Kind.PONG:
            number, here = head.fields
            there = set(here)
            for pending in list(self._open.values()):
                if pending.ping_number < number and pending.seq not in there:
                    self._send_request(pending)
        elif head.kind is Kind.WELCOME:
            self._welcomed(head.fields[0])
        elif head.kind is Kind.REFUSED:
            self._refuse(raisable(Failure(*head.fields), self._address))
        elif head.kind is Kind.LOST or head.kind is Kind.BYE:
            self._lose(f"{head.fields[0]} ({self._address})")

    def _welcomed(self, terms: dict[str, Any]) -> None:
        if self._welcome is not None:
            return
        try:
            self._welcome = Welcome.read(terms)
        except LongstepError as error:
            self._refuse(error)
        self._ready.set()

    def _refuse(self, error: LongstepError) -> None:
        """No handshake; once there has been one, a bad message is passed over and asked for again."""
        if self._welcome is None:
            self._refusal = error
            self._ready.set()

    def _finish(self, pending: Pending, answer: list[bytes | memoryview] | LongstepError) -> None:
        self._finished.append((pending, answer))  # first: what is still open is asked for again
        self._open.pop(pending.seq, None)
