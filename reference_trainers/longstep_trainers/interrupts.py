"""Ctrl-C and SIGTERM during training: end where the run can be resumed from.

During a rollout nothing has changed yet, so the signal ends it at once; during an update the weights are half-way, so
the update is finished first. A second signal ends the program in any case.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["GracefulStop", "StopRequested"]


class StopRequested(BaseException):
    """The run was asked to end. Not an `Exception`, so no handler for failures takes it for one."""


class GracefulStop:
    """A context in which the first SIGINT or SIGTERM raises `StopRequested` where stopping is safe.

    Only the main thread receives signals; in any other thread this does nothing.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        """Signals are taken over on entry."""
        self._is_safe = True
        self._requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> GracefulStop:
        """Take over the signals."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {name: signal.signal(name, self._handle) for name in self._SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        for name, handler in self._previous.items():
            signal.signal(name, handler)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """While this is open, a signal waits until it closes."""
        self._is_safe = False
        try:
            yield
        finally:
            self._is_safe = True
        if self._requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        if self._is_safe:
            raise StopRequested
