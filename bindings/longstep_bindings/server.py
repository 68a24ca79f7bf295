"""The RPC server: an address, one IO thread (`hub`), and worker threads that run the methods of a service."""

from __future__ import annotations

import atexit
import logging
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq

from longstep.errors import ConfigError
from longstep_bindings.calls import LATER, Call, Service, Session
from longstep_bindings.curve import CurveGuard, ServerKeys
from longstep_bindings.failures import Failure
from longstep_bindings.hub import SIGNAL_LOOK_S, Hub, Job
from longstep_bindings.lifeline import follow_parent
from longstep_bindings.limits import DEFAULT_LIMITS, Limits
from longstep_bindings.terms import Terms
from longstep_bindings.transport import (
    check_address,
    check_free,
    prepare,
    private_ipc_address,
    tidy_ipc,
)
from longstep_bindings.waker import Flag
from longstep_bindings.wire import decode

__all__ = ["Server"]

_log = logging.getLogger(__name__)
_GOODBYE_MS = 200
_JOIN_S = 2.0


class Server:
    """Serves one service at one address, bound from construction until `stop`.

    `with Server(service) as server:` serves in the background; `server.serve_forever()` serves in a process of its own
    and runs methods in the calling thread, which some environments insist on.

    A method that overruns its deadline cannot be stopped, only reported: its client gets a `DeadlineError` at the
    deadline, and the session executes nothing more, since what it holds is in an unknown state.
    """

    def __init__(
        self,
        service: Service,
        address: str | None = None,
        *,
        terms: Terms | None = None,
        num_threads: int = 1,
        keys: ServerKeys | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Args:
        service: What to serve.
        address: `ipc://path`, or `tcp://host:port` with `*` for a free port; None makes a private ipc address.
        terms: What each client is granted.
        num_threads: Worker threads: how many sessions can be in a method at the same moment.
        keys: CURVE keys; required for an address that other machines can reach.
        limits: Largest message taken in or sent.
        """
        if address is not None:
            check_address(address, has_keys=keys is not None)
        self.service = service
        self._limits = limits
        self._num_threads = num_threads
        self._stopping = Flag()
        self._is_stopped = False
        self._io: threading.Thread | None = None
        self._workers: list[threading.Thread] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = CurveGuard(self._context, keys) if keys else None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._hub = Hub(self._socket, service, terms or Terms(), limits)
        queue_length = 4 * (terms or Terms()).num_credits + 64
        prepare(self._socket, address or "", limits, queue_length=queue_length)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._guard:
            self._guard.secure(self._socket)
        self.address = self._bind(address or private_ipc_address())
        """Where clients connect."""
        atexit.register(self.stop)

    def _bind(self, address: str) -> str:
        try:
            check_free(address)
            self._socket.bind(address)
        except ConfigError:
            self._close_socket()
            self._hub.close()
            raise
        except zmq.ZMQError as error:
            self._close_socket()
            self._hub.close()
            raise ConfigError(f"expected an address to bind, got `{address}`: {error}") from None
        return bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    @property
    def num_refused_messages(self) -> int:
        """Messages dropped so far because they broke the protocol."""
        return self._hub.num_refused_messages

    def start(self) -> None:
        """Serve in background threads."""
        self._start(self._num_threads)

    def serve_forever(self, *, parent_pid: int | None = None) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; methods run in this thread too.

        Args:
            parent_pid: Process to follow: when it dies, serving ends, and this process is gone within 4 s.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self._begin_stop())
        if parent_pid is not None:
            follow_parent(parent_pid, self._begin_stop, before_exit=lambda: tidy_ipc(self.address))
        self._start(self._num_threads - 1)
        self._work(self._hub.next_job if self._num_threads == 1 else self._next_job)
        self.stop()

    def _next_job(self) -> Job:
        """The next job, for a thread that signals interrupt: one that comes just before it waits wakes nobody."""
        while True:
            with suppress(queue.Empty):
                return self._hub.jobs.get(timeout=SIGNAL_LOOK_S)

    def _start(self, num_workers: int) -> None:
        self._io = self._spawn(self._serve, "io")
        self._workers = [self._spawn(self._work, f"worker-{i}") for i in range(num_workers)]

    def _spawn(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"longstep-rpc-{name}", daemon=True)
        thread.start()
        return thread

    def _serve(self) -> None:
        try:
            self._hub.run(self._stopping)
        finally:
            self._begin_stop()
            self._close_socket()

    def _begin_stop(self) -> None:
        """Make every thread of the server end; may run in a signal handler."""
        self._stopping.set()
        for _ in range(self._num_threads):
            self._hub.jobs.put(None)
        self._hub.wake()

    def stop(self) -> None:
        """Say goodbye to the clients, close their sessions, release the address. Safe to call again."""
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self.stop)
        self._begin_stop()
        for thread in self._workers:
            thread.join(_JOIN_S)
        if self._io is None:
            self._close_socket()
        else:
            self._io.join(_JOIN_S)
        for session in self._hub.idle_sessions():
            self._close_session(session)
        self._hub.close()
        tidy_ipc(self.address)

    def _close_socket(self) -> None:
        self._socket.close(linger=_GOODBYE_MS)  # for goodbyes; anything else can be asked for again
        if self._guard:
            self._guard.stop()
        self._context.term()

    def _work(self, next_job: Callable[[], Job] | None = None) -> None:
        """Execute calls until told to end."""
        next_job = next_job or self._hub.jobs.get
        while (job := next_job()) is not None:
            if self._stopping.is_set():
                return
            if job[0] == "call":
                self._execute(job[1])
            else:
                self._close_session(job[1])

    def _execute(self, call: Call) -> None:
        hub, value = self._hub, LATER
        try:
            if not call.cancelled:
                call.value = decode(call.frames, self._limits)
                call.frames = None
                value = self.service.methods[call.method](call)
            if value is LATER:
                hub.returned(call)
            else:
                hub.answer(call, value, None, has_returned=True)
        except Exception as error:  # whatever a service raises is its client's to know
            hub.answer(call, None, Failure.of(error), has_returned=True)
        except BaseException:
            hub.returned(call)
            raise

    def _close_session(self, session: Session) -> None:
        try:
            self.service.close_session(session)
        except Exception:  # nobody is left to be told
            _log.exception("close_session failed for %s", session)

    def __enter__(self) -> Self:
        """Start serving."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop serving."""
        self.stop()
