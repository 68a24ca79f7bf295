"""What a service implements and what it is handed: the interface between the RPC layer and everything put on top.

A service names its methods and gets a `Call` for each request. A method that returns a value has answered. A method that
returns `LATER` keeps the call and answers it from any thread with `call.reply` or `call.fail`; that is how results come
out of order, and how a request waits for something without holding a thread.

Within one session methods start strictly in the order of the client's requests, and the next starts only when the one
before has returned (a `LATER` counts as returned). Sessions run beside each other, on the server's worker threads.

    class Counter:
        name, version = "example.counter", 1

        def __init__(self):
            self.methods = {"add": self.add}

        def add(self, call):
            call.session.state = (call.session.state or 0) + call.value
            return call.session.state

        def close_session(self, session):
            pass
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from longstep_bindings.failures import Failure

__all__ = ["LATER", "Call", "Encoded", "Service", "Session"]


class Encoded:
    """A value that its service has encoded itself, as `wire.encode` does; given in place of the value."""

    __slots__ = ("frames",)

    def __init__(self, frames: list[bytes]) -> None:
        """Args:
        frames: What `wire.encode` gave.
        """
        self.frames = frames


class _Later:
    """The type of `LATER`."""

    def __repr__(self) -> str:
        return "LATER"


LATER: Final = _Later()
"""Returned by a method that will answer its call itself."""


class Session:
    """One client, from its handshake to its goodbye; reconnecting keeps it."""

    __slots__ = ("name", "number", "state")

    def __init__(self, number: int, name: str) -> None:
        """Args:
        number: Unique within this server's life.
        name: The client's name, unique among the open sessions.
        """
        self.number = number
        self.name = name
        self.state: Any = None
        """Whatever the service keeps for this client."""

    def __repr__(self) -> str:
        return f"Session(number={self.number}, name={self.name!r})"


Answer = Callable[["Call", Any, Failure | None], None]


class Call:
    """One request. Answered once: by the method's value, by `reply`, by `fail`, or by its deadline."""

    __slots__ = ("_answer", "cancelled", "deadline", "frames", "method", "seq", "session", "value")

    def __init__(
        self, session: Session, seq: int, method: str, deadline: float, frames: Any, answer: Answer
    ) -> None:
        """Made by the server; `frames` are the undecoded body, `answer` hands the outcome to the server."""
        self.session = session
        self.seq = seq
        self.method = method
        self.deadline = deadline
        """Moment on `time.monotonic` at which the client gives up."""
        self.frames = frames
        self.value: Any = None
        """What the client sent with the request; None again once the call is answered."""
        self.cancelled = False
        """True once nobody waits for the answer: withdrawn, past its deadline, or the session closed."""
        self._answer = answer

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self.deadline - time.monotonic())

    def reply(self, value: Any) -> None:
        """Answer with a value. Without effect when the call has been answered or nobody waits.

        A value that cannot travel is answered with the error that names its place.
        """
        self._answer(self, value, None)

    def fail(self, error: BaseException) -> None:
        """Answer with an error, raised again in the client as the `LongstepError` it is, or as its root."""
        self._answer(self, None, Failure.of(error))

    def __repr__(self) -> str:
        return f"Call({self.session.name!r}, seq={self.seq}, method={self.method!r})"


class Service(Protocol):
    """What a server serves."""

    name: str
    """What it is, such as `longstep.env`; a client that asks for another service is refused."""
    version: int
    """Version of its methods and their values; a client that expects another version is refused."""
    methods: Mapping[str, Callable[[Call], Any]]
    """By name. A method's value, or the error it raises, is the answer; `LATER` defers it."""

    def close_session(self, session: Session) -> None:
        """Release what `session.state` holds. Called once, after the session's last method has returned."""
        ...
