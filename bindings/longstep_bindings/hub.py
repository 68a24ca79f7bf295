"""The server's side of the socket: it keeps every session's book.

A thread of its own reads heads, keeps books and enforces deadlines. It never runs a service's code and never decodes a
body, so a hanging or crashing method cannot silence it. Workers get calls through a queue, and send what became of them
themselves, under a lock that guards socket and books. A worker that waits for calls may *attend*: it then reads the
messages too, so that a call costs one switch of threads and not two, and the thread only looks in ten times a second.

A message that could not be sent is not kept for later: its answer stays in the book, and the client's next heartbeat
shows that it is still missing.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import threading
import time
from dataclasses import asdict
from typing import Any, Literal

import zmq

from longstep.errors import (
    ConfigError,
    DeadlineError,
    LongstepError,
    ProtocolError,
    RegistryError,
    SessionLostError,
    did_you_mean,
)
from longstep_bindings.calls import Call, Encoded, Service, Session
from longstep_bindings.failures import Failure
from longstep_bindings.heads import Head, Kind, WrongVersionError, pack_head, unpack_head
from longstep_bindings.limits import Limits
from longstep_bindings.sessions import Book
from longstep_bindings.terms import Terms
from longstep_bindings.transport import Poller, descriptor, has_message, receive, send
from longstep_bindings.waker import Flag, Waker
from longstep_bindings.wire import encode

__all__ = ["SIGNAL_LOOK_S", "Hub", "Job"]

Job = tuple[Literal["call"], Call] | tuple[Literal["close"], Session] | None
"""What a worker does next: execute a call, close a session, or (None) end."""
SIGNAL_LOOK_S = 0.5
"""How long the main thread waits at most: a signal that comes just before a wait has its handler run after it."""
_TICK_S = 0.1
_FEW_DEADLINES = 256
_FAREWELL_S = 0.15
_NEVER_LOST = "the server does not know this session: it restarted, or gave the client up"


class Hub:
    """Between the socket and the workers."""

    def __init__(
        self, socket: zmq.Socket[bytes], service: Service, terms: Terms, limits: Limits
    ) -> None:
        """Args:
        socket: A bound ROUTER socket, used by nobody else while `run` runs.
        service: Asked for its name, version and methods only.
        terms: What each client is granted.
        limits: Largest message taken in or sent.
        """
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.waker = Waker()
        self.jobs_waker = Waker()
        """Woken when there is a job for a worker that attends."""
        self._attended = self._is_waiting = self._is_over = False
        self._attendant: Poller | None = None
        """What the attending worker waits with, if there is one."""
        self._attendant_ident = 0
        self._lock = threading.RLock()
        self.num_refused_messages = 0
        self._socket = socket
        self._service = service
        self._terms = terms
        self._limits = limits
        self._books: dict[bytes, Book] = {}
        """Open sessions by token."""
        self._owners: dict[int, Book] = {}
        """Every session whose `close_session` has not been asked for, by number."""
        self._numbers = itertools.count(1)
        self._deadlines: list[tuple[float, int, Call]] = []
        """A heap; of calls that were answered too, until there are many."""
        self._many_deadlines = _FEW_DEADLINES

    # ---- called by workers and by whoever answers a deferred call ----

    def answer(
        self, call: Call, value: Any, failure: Failure | None, *, has_returned: bool = False
    ) -> None:
        """Take the outcome of `call`; the first one counts.

        Args:
            call: The request.
            value: What its method gave.
            failure: Why there is no value.
            has_returned: The method has returned too, see `returned`.
        """
        outcome: list[bytes] | Failure
        try:
            frames = value.frames if type(value) is Encoded else None
            outcome = failure or frames or encode(value, self._limits)
        except LongstepError as error:
            outcome = Failure.of(error)
        call.value = None  # the book may keep the call for a while, and its arguments may be large
        with self._lock:
            book = self._owners.get(call.session.number)
            if book is None:
                return
            if not self._is_over and book.is_open(call):
                self._keep_answer(book, call, outcome)
                if threading.get_ident() != self._attendant_ident:  # which looks before it waits
                    self._leave_socket()
            if has_returned:
                self._has_returned(book)

    def returned(self, call: Call) -> None:
        """Take note that the method of `call` has returned: the session's next call may start."""
        with self._lock:
            book = self._owners.get(call.session.number)
            if book is not None:
                self._has_returned(book)

    def _has_returned(self, book: Book) -> None:
        book.running = None
        if book.dropped:
            self._ask_to_close(book)
        else:
            self._advance(book)

    def next_job(self) -> Job:
        """The next job, for a worker that waits for nothing else and has no colleagues: it reads the messages itself."""
        poller = self._attendant or self._new_attendant()
        while poller is not None and self.jobs.empty():
            self._attended = self._is_waiting = True
            ready = self.jobs.empty() and (self._has_message() or poller.wait(SIGNAL_LOOK_S))
            self._is_waiting = False
            with self._lock:
                if ready and not self._is_over:
                    self._take_message()
            self._attended = False
        return self.jobs.get()  # without a poller: the end, which is being announced

    def _has_message(self) -> bool:
        with self._lock:
            return not self._is_over and has_message(self._socket)

    def _new_attendant(self) -> Poller | None:
        """What to wait with for messages and jobs; None once serving is over, for then the socket may be closed."""
        with self._lock:
            if not self._is_over:
                self._attendant_ident = threading.get_ident()
                self._attendant = Poller(self.jobs_waker, descriptor(self._socket))
            return self._attendant

    def wake(self) -> None:
        """Wake whoever waits for messages or jobs; may run in a signal handler."""
        self.waker.wake()
        self.jobs_waker.wake()

    def close(self) -> None:
        """Free what `wake` needs."""
        self.waker.close()
        self.jobs_waker.close()

    # ---- the loop ----

    def run(self, stopping: Flag) -> None:
        """Serve until `stopping` is set and the waker woken, then say goodbye to every client."""
        alone, beside = Poller(self.waker, descriptor(self._socket)), Poller(self.waker)
        tick_at = time.monotonic() + _TICK_S
        while not stopping.is_set():
            due = min(tick_at, self._deadlines[0][0]) if self._deadlines else tick_at
            (beside if self._attended else alone).wait(due - time.monotonic())
            now = time.monotonic()
            with self._lock:
                self._take_messages()
                self._expire(now)
                if now >= tick_at:
                    self._drop_silent(now)
                    tick_at = now + _TICK_S
        with self._lock:
            self._is_over = True
            for book in self._books.values():
                self._send(book, pack_head(Kind.BYE, book.token, "the server stops"))
        if self._books:
            # A client's socket drops what it has not read when the connection ends.
            time.sleep(_FAREWELL_S)

    def idle_sessions(self) -> list[Session]:
        """Sessions that are open and in no method; to be closed by the caller once `run` has returned."""
        return [book.session for book in self._owners.values() if book.running is None]

    def _take_messages(self) -> None:
        for _ in range(100):  # then look at deadlines again
            if not has_message(self._socket):
                return
            self._take_message()
        self.waker.wake()  # there may be more

    def _take_message(self) -> None:
        """Take one message, if there is one."""
        route = b""
        try:
            route, frames = receive(self._socket, self._limits, routed=True)
            self._read_message(route, unpack_head(bytes(frames[0])), frames[1:])
        except zmq.Again:
            return
        except WrongVersionError as error:
            self.num_refused_messages += 1
            self._refuse(route, error.token, error)
        except ProtocolError:
            self.num_refused_messages += 1

    def _leave_socket(self) -> None:
        """Have the thread look for what this use of the socket may have kept from whoever waits for messages."""
        if has_message(self._socket):
            self.waker.wake()

    def _read_message(self, route: bytes, head: Head, frames: list[bytes | memoryview]) -> None:
        if head.kind is Kind.HELLO:
            self._hello(route, head)
            return
        book = self._books.get(head.token)
        if book is None:
            if head.kind is not Kind.BYE:
                self._send_to(route, [pack_head(Kind.LOST, head.token, _NEVER_LOST)])
            return
        book.route, book.heard_at = route, time.monotonic()
        if head.kind is Kind.REQUEST:
            self._request(book, head, frames)
        elif head.kind is Kind.PING:
            self._ping(book, head)
        elif head.kind is Kind.CANCEL:
            book.forget(head.fields[0])
            self._advance(book)
        elif head.kind is Kind.BYE:
            self._drop(book)
        else:
            raise ProtocolError(f"expected a message from a client, got {head.kind.name}")

    # ---- sessions ----

    def _hello(self, route: bytes, head: Head) -> None:
        book = self._books.get(head.token)
        if book is None:
            try:
                book = self._open(route, head)
            except LongstepError as error:
                self._refuse(route, head.token, error)
                return
        book.route, book.heard_at = route, time.monotonic()
        welcome = {
            "service": self._service.name,
            "service_version": self._service.version,
            "methods": sorted(self._service.methods),
            "pid": os.getpid(),
            "num_credits": self._terms.num_credits,
            "heartbeat_ms": int(self._terms.heartbeat_s * 1000),
            "lost_after_ms": int(self._terms.lost_after_s * 1000),
            "limits": asdict(self._limits),
        }
        self._send(book, pack_head(Kind.WELCOME, head.token, welcome))

    def _open(self, route: bytes, head: Head) -> Book:
        asked: dict[str, Any] = head.fields[0]
        name = asked.get("name")
        if type(name) is not str or not 0 < len(name) <= 200:
            raise ProtocolError("expected a name of 1 to 200 characters in HELLO")
        offered = (self._service.name, self._service.version)
        if (asked.get("service"), asked.get("service_version")) != offered:
            raise ConfigError(
                f"expected a client of `{offered[0]}` version {offered[1]}, got one of "
                f"{asked.get('service')!r:.80} version {asked.get('service_version')!r:.40}; "
                "check the address, or install the same version on both sides"
            )
        if any(book.session.name == name for book in self._books.values()):
            raise ConfigError(
                f"expected a client name that is not in use, got `{name}`; choose another, or "
                f"wait {self._terms.lost_after_s:g} s if its owner died"
            )
        if len(self._books) >= self._terms.max_sessions:
            raise ConfigError(f"expected at most {self._terms.max_sessions} clients, got one more")
        session = Session(next(self._numbers), name)
        book = Book(session, head.token, route, self._terms.num_credits)
        self._books[head.token] = self._owners[session.number] = book
        return book

    def _drop(self, book: Book) -> None:
        """The client is gone: withdraw its calls, close the session once no method runs."""
        del self._books[book.token]
        book.dropped = True
        for seq in book.here:
            book.forget(seq)
        if book.running is None:
            self._ask_to_close(book)
        else:
            book.running.cancelled = True

    def _ask_to_close(self, book: Book) -> None:
        del self._owners[book.session.number]
        self._put(("close", book.session))

    def _drop_silent(self, now: float) -> None:
        for book in list(self._books.values()):
            if now - book.heard_at > self._terms.lost_after_s:
                self._drop(book)

    # ---- requests ----

    def _request(self, book: Book, head: Head, frames: list[bytes | memoryview]) -> None:
        seq, upto, open_seqs, remaining_ms, method = head.fields
        book.settle(upto, open_seqs)
        if seq in book.answers:
            self._send_answer(book, seq)
        elif book.is_new(seq, open_seqs):
            deadline = time.monotonic() + remaining_ms / 1000
            call = Call(book.session, seq, method, deadline, frames, self.answer)
            book.add(call, open_seqs)
            if method not in self._service.methods:
                hint = did_you_mean(method, self._service.methods)
                said = f"expected a method of `{self._service.name}`, got `{method:.200}`; {hint}"
                self._keep_answer(book, call, Failure.of(RegistryError(said)))
            elif book.lost:
                self._keep_answer(book, call, Failure.of(SessionLostError(book.lost)))
            else:
                self._keep_deadline(deadline, call)
        self._advance(book)

    def _keep_deadline(self, deadline: float, call: Call) -> None:
        entry = (deadline, id(call), call)
        if len(self._deadlines) < self._many_deadlines:
            heapq.heappush(self._deadlines, entry)
            return
        waiting = [kept for kept in self._deadlines if self._is_unanswered(kept[2])]
        waiting.append(entry)
        heapq.heapify(waiting)
        self._deadlines = (
            waiting  # at once, and never empty: the thread looks at the first without the lock
        )
        self._many_deadlines = _FEW_DEADLINES + 2 * len(waiting)

    def _is_unanswered(self, call: Call) -> bool:
        book = self._owners.get(call.session.number)
        return book is not None and book.is_open(call)

    def _ping(self, book: Book, head: Head) -> None:
        number, upto, open_seqs = head.fields
        book.settle(upto, open_seqs)
        long_ago = time.monotonic() - self._terms.heartbeat_s / 2
        for seq in [seq for seq, (sent_at, _) in book.answers.items() if sent_at < long_ago]:
            self._send_answer(book, seq)
        self._send(book, pack_head(Kind.PONG, book.token, number, book.here))
        self._advance(book)

    def _advance(self, book: Book) -> None:
        call = book.next_call()
        if call is not None:
            self._put(("call", call))

    def _put(self, job: Job) -> None:
        self.jobs.put(job)
        if self._is_waiting:
            self.jobs_waker.wake()

    def _keep_answer(self, book: Book, call: Call, outcome: list[bytes] | Failure) -> None:
        if isinstance(outcome, Failure):
            said = (outcome.kind, outcome.message, outcome.where)
            frames = [pack_head(Kind.ERROR, book.token, call.seq, *said)]
        else:
            frames = [pack_head(Kind.REPLY, book.token, call.seq), *outcome]
        book.answer(call, frames)
        self._send_answer(book, call.seq)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            call = heapq.heappop(self._deadlines)[2]
            book = self._owners.get(call.session.number)
            if book is None or not book.is_open(call):
                continue
            call.cancelled = True
            if book.running is call:
                self._overrun(book, call)
            elif book.is_waiting(call):
                said = f"`{call.method}` was not executed: its deadline passed while it waited its turn"
                self._keep_answer(book, call, Failure.of(DeadlineError(said)))
            else:
                said = f"`{call.method}` gave no answer within its deadline"
                self._keep_answer(book, call, Failure.of(DeadlineError(said)))

    def _overrun(self, book: Book, call: Call) -> None:
        """A running method cannot be stopped: report it, and execute nothing more on what it may be changing."""
        said = f"`{call.method}` still ran at its deadline; the session's state is unknown now"
        self._keep_answer(book, call, Failure.of(DeadlineError(said)))
        book.lost = f"an earlier call of {said}; open a new session"
        for waiting in book.waiting_calls():
            self._keep_answer(book, waiting, Failure.of(SessionLostError(book.lost)))

    # ---- sending ----

    def _send_answer(self, book: Book, seq: int) -> None:
        frames = book.answers[seq][1]
        book.answers[seq] = (time.monotonic(), frames)
        self._send_to(book.route, frames)

    def _send(self, book: Book, head: bytes) -> None:
        self._send_to(book.route, [head])

    def _refuse(self, route: bytes, token: bytes, error: Exception) -> None:
        failure = Failure.of(error)
        self._send_to(route, [pack_head(Kind.REFUSED, token, failure.kind, failure.message)])

    def _send_to(self, route: bytes, frames: list[bytes]) -> None:
        try:
            send(self._socket, [route, *frames])
        except zmq.ZMQError:
            return  # full or gone: see the module's last paragraph
