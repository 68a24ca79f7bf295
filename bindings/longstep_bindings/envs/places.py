"""Where a client's worker is: a process of its own that it starts anew when it goes down, or a server that it is given."""

from __future__ import annotations

import threading
from typing import Protocol

from longstep_bindings.envs.process import WorkerProcess, WorkerSettings
from longstep_bindings.envs.service import Suspect

__all__ = ["LocalPlace", "Place", "ServerPlace"]


class Place(Protocol):
    """One worker at a time."""

    starts: bool
    """True when `open` starts a worker, False when somebody else does, in his own time."""

    def open(self) -> str:
        """The address of a worker that can be reached now."""
        ...

    def why_down(self) -> str | None:
        """Why the worker is of no more use; None while nothing is known against it."""
        ...

    def drop(self) -> None:
        """Give the worker up, at once."""
        ...

    def begin_close(self) -> None:
        """Ask the worker to end."""
        ...

    def close(self) -> None:
        """End the worker after `begin_close`."""
        ...


class LocalPlace:
    """Processes of this machine, one after the other."""

    starts = True

    def __init__(self, settings: WorkerSettings, address: str | None = None) -> None:
        """Args:
        settings: What to start.
        address: Where each of them serves; None is a private address of each one's own.
        """
        self.address = address
        """Where the next worker serves."""
        self._settings = settings
        self._closing = threading.Event()
        self._worker: WorkerProcess | None = None
        self._suspects: list[Suspect] = []

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        return self._worker.pid if self._worker else None

    def open(self) -> str:
        """Start a worker."""
        self._worker = WorkerProcess(
            self._settings,
            address=self.address,
            suspects=self._suspects,
            closing=self._closing,
        )
        self._suspects = []
        return self._worker.address

    def why_down(self) -> str | None:
        """Whether it ended or is past a deadline."""
        return self._worker.why_down() if self._worker else "there is no worker"

    def drop(self) -> None:
        """Kill it; what it was executing is told to the next."""
        if self._worker is not None:
            self._suspects += self._worker.suspects()
            self._worker.end()
            self._worker = None

    def begin_close(self) -> None:
        """Ask it to end; one that is being started is given up."""
        self._closing.set()
        worker = self._worker
        if worker is not None:
            worker.terminate()

    def close(self) -> None:
        """Wait for its end, or kill it."""
        if self._worker is not None:
            self._worker.end(self._settings.end_grace_s)
            self._worker = None


class ServerPlace:
    """A server that somebody else runs and restarts."""

    starts = False

    def __init__(self, address: str) -> None:
        """Args:
        address: Where it is.
        """
        self._address = address

    def open(self) -> str:
        """The address."""
        return self._address

    def why_down(self) -> None:
        """Nothing is known."""

    def drop(self) -> None:
        """Nothing to be done."""

    def begin_close(self) -> None:
        """Nothing to be done."""

    def close(self) -> None:
        """Nothing to be done."""
