"""The RPC client: calls of one server's methods from any thread, answered in any order, each exactly once or not at all.

One thread owns the socket (`ClientLoop` in `client_loop`). Calling threads encode, hand over and wait; they also decode,
so a large answer costs the thread that wants it.

What a caller can rely on: a `Pending` ends within its timeout and a half second, with the method's value, the method's
error, or an error that says why there is none. A request whose message or answer was lost is sent again under the same
number and is not executed again. `SessionLostError` means that the server's side of this client is gone for good: close
the client and open another.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from longstep.errors import ConfigError, DeadlineError, SessionLostError
from longstep_bindings.calls import Encoded
from longstep_bindings.client_loop import Attendance, ClientLoop, Welcome
from longstep_bindings.curve import ClientKeys
from longstep_bindings.limits import DEFAULT_LIMITS, Limits
from longstep_bindings.pending import Pending
from longstep_bindings.transport import check_address
from longstep_bindings.wire import encode

__all__ = ["Client"]


class Client:
    """A session with one server.

    with Client(address, service="example.counter", version=1) as client:
        total = client.call("add", 3, timeout_s=5.0)
    """

    def __init__(
        self,
        address: str,
        *,
        service: str,
        version: int,
        name: str | None = None,
        connect_timeout_s: float = 10.0,
        keys: ClientKeys | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Connect and shake hands.

        Args:
            address: The server's address.
            service: The service that must be there.
            version: The version of that service.
            name: Unique among the server's clients; None makes one up.
            connect_timeout_s: How long the server may take to be there and answer.
            keys: CURVE keys; required for an address off this machine.
            limits: Largest message taken in. What is sent also keeps the server's.

        Raises:
            ConfigError: The server refused: another service, version or protocol, or the name is in use.
            DeadlineError: No server answered in time.
        """
        check_address(address, has_keys=keys is not None)
        self.address = address
        self.name = name or f"pid-{os.getpid()}-{secrets.token_hex(6)}"
        hello = {"name": self.name, "service": service, "service_version": version}
        self._loop = ClientLoop(address, hello, keys, limits)
        self.has_answers, self.take_answers = self._loop.has_answers, self._loop.take_answers
        """For who attends, see `be_attended`."""
        try:
            self.server: Welcome = self._loop.connect(connect_timeout_s)
            """What the server said of itself and its terms."""
        except BaseException:
            self._loop.close()
            raise
        atexit.register(self.close)
        self._credits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(self.server.num_credits):
            self._credits.put(None)
        self._release = functools.partial(self._credits.put, None)

    @property
    def num_credits(self) -> int:
        """Most requests in flight; a further `submit` waits for an answer to an earlier one."""
        return self.server.num_credits

    @property
    def lost(self) -> str | None:
        """Why the session is lost; None while it is open."""
        return self._loop.lost

    def submit(
        self,
        method: str,
        value: Any = None,
        *,
        timeout_s: float,
        on_done: Callable[[Pending], None] | None = None,
    ) -> Pending:
        """Send a request without waiting for its answer; waits only while all credits are in use.

        Args:
            method: One of the service's methods.
            value: What the method gets; see `wire` for what can travel. Or an `Encoded` of it, within the server's limits.
            timeout_s: Seconds for everything, waiting for a credit included. The server keeps the same deadline.
            on_done: Called once the answer is there, in the client's own thread or one that attends: put it in a queue, do
                no work. An interrupted attendant calls it again.

        Raises:
            UnsupportedTypeError: `value` cannot travel.
            DeadlineError: No credit became free in time.
            SessionLostError: The session is lost, or this client closed.
        """
        deadline = time.monotonic() + timeout_s
        if timeout_s <= 0:
            raise ConfigError(f"expected `timeout_s` above 0, got {timeout_s}")
        frames = value.frames if type(value) is Encoded else encode(value, self.server.limits)
        try:
            self._credits.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(
                f"expected a free credit of {self.num_credits} within {timeout_s:g} s for "
                f"`{method}` at {self.address}; take answers sooner, or grant more credits"
            ) from None
        if self._loop.lost is not None:
            self._release()
            raise SessionLostError(self._loop.lost)
        pending = Pending(method, deadline, frames, self._loop, self._release, on_done)
        self._loop.request(pending)
        return pending

    def call(self, method: str, value: Any = None, *, timeout_s: float) -> Any:
        """The value that a method gives, waiting for it; raises what the method raised. See `submit`."""
        return self.submit(method, value, timeout_s=timeout_s).result()

    def be_attended(self, attendance: Attendance) -> int:
        """Let a thread that waits for answers take them itself, by `has_answers` and `take_answers`, while it says that it does.

        Returns:
            A descriptor that becomes readable when answers may be there.
        """
        self._loop.attendance = attendance
        return self._loop.descriptor

    def close(self) -> None:
        """Say goodbye and free the socket; what is in flight ends with `SessionLostError`. Safe to call again."""
        atexit.unregister(self.close)
        self._loop.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
