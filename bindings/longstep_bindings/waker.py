"""Waking a thread that waits in a poll, from any other thread or from a signal handler.

A `threading.Event` is not for signal handlers: `set` takes a lock, and a handler that interrupts a `set` or a `wait` of
its own thread waits for that lock for ever.
"""

from __future__ import annotations

import socket
from contextlib import suppress

__all__ = ["Flag", "Waker"]


class Flag:
    """Something that is false until it is set; a signal handler may set it. Nobody can wait for it."""

    def __init__(self) -> None:
        """Not set."""
        self._is_set = False

    def is_set(self) -> bool:
        """True once `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Set it, for good."""
        self._is_set = True


class Waker:
    """A socket pair to poll on; many wakes before the next `clear` cost one byte."""

    def __init__(self) -> None:
        """Open the pair."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_set = False

    def fileno(self) -> int:
        """The descriptor that becomes readable on `wake`."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable."""
        if not self._is_set:
            self._is_set = True
            with suppress(OSError):  # full: readable already; closed: nobody waits any more
                self._writer.send(b"w")

    def clear(self) -> None:
        """Make it unreadable. Look at what the wakes announced after this call, never before."""
        if self._is_set:
            with suppress(OSError):
                self._reader.recv(64)
            self._is_set = False

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
