"""A request that has been handed over and not yet been answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from longstep.errors import LongstepError
from longstep_bindings.limits import Limits
from longstep_bindings.wire import decode

__all__ = ["Pending"]

Frames = Sequence[bytes | memoryview]


class Withdrawer(Protocol):
    """What a pending request is withdrawn from."""

    limits: Limits

    def withdraw(self, pending: Pending) -> None:
        """Forget `pending`, here and at the server."""
        ...


class Pending:
    """The answer to come. Ends in any case: with the answer, or at its deadline, or when the session is lost."""

    def __init__(
        self,
        method: str,
        deadline: float,
        frames: list[bytes],
        loop: Withdrawer,
        release: Callable[[], None],
        on_done: Callable[[Pending], None] | None,
    ) -> None:
        """Made by `Client.submit`."""
        self.method = method
        self.deadline = deadline
        """Moment on `time.monotonic` until which the answer may come."""
        self.frames = frames
        self.seq = 0
        """Number of the request; 0 until it has been sent."""
        self.ping_number = 0
        """The client's last heartbeat before this request was sent."""
        self._loop = loop
        self._release: Callable[[], None] | None = release
        self._on_done = on_done
        self.is_done = False
        """True once `result` gives or raises without waiting."""
        self._latch = threading.Lock()
        """Held until then. An Event would cost more than all the rest of this."""
        self._latch.acquire()
        self._answer: Frames | LongstepError | None = None

    def result(self) -> Any:
        """The method's value; waits for it.

        Raises:
            DeadlineError: The deadline passed, at the server or here.
            SessionLostError: The server is gone.
            ProtocolError: The answer cannot be read.
            LongstepError: What the method raised, or that the request was withdrawn.
        """
        if not self.is_done:
            with self._latch:
                pass
        if isinstance(self._answer, LongstepError):
            raise self._answer
        assert self._answer is not None
        return decode(self._answer, self._loop.limits)

    def cancel(self) -> None:
        """Withdraw the request: not executed if it has not begun, its answer dropped otherwise."""
        self._loop.withdraw(self)

    def finish(self, answer: Frames | LongstepError) -> None:
        """Take the answer and free the credit. Safe to repeat when it was interrupted; `on_done` is called again then."""
        self._answer = answer
        self.frames = []
        release, self._release = self._release, None
        if release is not None:
            release()
        self.is_done = True
        if self._latch.locked():
            self._latch.release()
        if self._on_done is not None:
            self._on_done(self)
