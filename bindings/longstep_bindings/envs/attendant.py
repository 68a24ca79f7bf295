"""Waiting for the answers of several workers at once, in the thread of whoever wants them.

While it waits it attends to the clients of their sessions, which spares each message a switch of threads; see
`client_loop`.
"""

from __future__ import annotations

from longstep_bindings.client import Client
from longstep_bindings.client_loop import Attendance
from longstep_bindings.transport import Poller
from longstep_bindings.waker import Waker

__all__ = ["Attendant"]


class Attendant:
    """Waits until some worker may have answered. One thread at a time may `wait`; any may `wake`."""

    def __init__(self) -> None:
        """Attend to nobody yet."""
        self._waker = Waker()
        self._poller = Poller(self._waker)
        self._attendance, self._is_taking = Attendance(), False
        self._descriptors: list[int] = []
        self._attended: list[Client | None] = []
        """Whose answers the poller waits for."""

    def wake(self) -> None:
        """End the wait; called when an answer has arrived or something has changed."""
        if not self._is_taking:  # who takes answers looks at all of them afterwards
            self._waker.wake()

    def wait(self, clients: list[Client | None], timeout_s: float | None) -> None:
        """Wait for answers or a `wake`, and have the clients take in what is there.

        Args:
            clients: One for each worker; None where there is no session now.
            timeout_s: Longest wait; None waits for ever.
        """
        if clients != self._attended:
            self._descriptors = [
                client.be_attended(self._attendance) if client else -1 for client in clients
            ]
            self._poller = Poller(self._waker, *(fd for fd in self._descriptors if fd >= 0))
            self._attended = clients
        self._attendance.is_on = True
        try:
            ready = [client for client in clients if client is not None and client.has_answers()]
            if not ready:
                ready = [
                    clients[self._descriptors.index(fd)] for fd in self._poller.wait(timeout_s)
                ]
        finally:
            self._attendance.is_on = False
        self._is_taking = True
        try:
            for client in ready:
                if client is not None:
                    client.take_answers()
        finally:
            self._is_taking = False

    def close(self) -> None:
        """Free the waker's descriptors."""
        self._waker.close()
