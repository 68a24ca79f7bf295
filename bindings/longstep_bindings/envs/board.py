"""The deadline board: what a worker is executing right now and until when it may, readable by the process that started it.

A worker that hangs in native code, or was stopped, cannot report that it is late; one that was killed cannot report
which environment it was executing. So it writes both, before each step, into memory that its parent sees: a file
without a name, mapped by both. Nothing of it remains when both are gone.

It also writes a *beat* four times a second, by which a worker that was stopped while it rests is told from one that
rests. Nothing is concluded from its absence while something is executed, which may hold up the worker's threads.

A *line* of the board belongs to one thread of the worker. Times are `time.monotonic`, which one machine has once.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from typing import Any

import numpy as np

__all__ = ["Board", "Line", "new_board_file"]

_NUM_LINES = 4096
_LINES_BYTES = _NUM_LINES * 24
_SIZE_BYTES = _LINES_BYTES + 8
_BEAT_S = 0.25


def new_board_file() -> int:
    """The descriptor of a new board; to be inherited by the worker."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_SIZE_BYTES)
        return os.dup(file.fileno())


class Board:
    """One board, seen from either side."""

    def __init__(self, fd: int) -> None:
        """Map the board and close `fd`."""
        self._memory = mmap.mmap(fd, _SIZE_BYTES)
        os.close(fd)
        view = memoryview(self._memory)
        self._deadlines = view[: _NUM_LINES * 8].cast("d")
        self._owners = view[_NUM_LINES * 8 : _NUM_LINES * 16].cast("q")
        self._slots = view[_NUM_LINES * 16 : _LINES_BYTES].cast("q")
        self._beat = view[_LINES_BYTES:].cast("d")
        view.release()
        self._num_lines = 0
        self._free: list[int] = []

    def new_line(self, owner: int) -> Line:
        """A line for one more thread; those beyond the last share it, and what they execute is not seen by all."""
        number = self._free.pop() if self._free else min(self._num_lines, _NUM_LINES - 1)
        self._num_lines = max(self._num_lines, number + 1)
        kind = Line if number < _NUM_LINES - 1 else _SharedLine
        return kind(number, owner, self._deadlines, self._owners, self._slots, self._beat)

    def release(self, line: Line) -> None:
        """Let another thread have a line."""
        line.end()
        if line.number < _NUM_LINES - 1:
            self._free.append(line.number)

    def running(self) -> list[tuple[float, int, int]]:
        """What is executed: deadline, owner and slot."""
        deadlines = np.array(self._deadlines)  # a copy: the worker goes on writing
        lines = np.flatnonzero(deadlines).tolist()
        return [(float(deadlines[i]), self._owners[i], self._slots[i]) for i in lines]

    def start_beating(self) -> None:
        """Write beats from now on, in a thread of its own; for the worker's side."""

        def beat() -> None:
            while True:
                self._beat[0] = time.monotonic()
                time.sleep(_BEAT_S)

        threading.Thread(target=beat, name="longstep-beat", daemon=True).start()

    def silent_s(self) -> float:
        """Seconds since the last beat, if the worker rests; 0 before the first, and while anything is executed."""
        now = time.monotonic()
        if np.any(np.asarray(self._deadlines)):
            return 0.0
        beat_at = self._beat[0]  # read last: the end of what was executed is a beat
        return now - beat_at if beat_at else 0.0

    def close(self) -> None:
        """Unmap."""
        for view in (self._deadlines, self._owners, self._slots, self._beat):
            view.release()
        self._memory.close()


class Line:
    """What one thread executes."""

    __slots__ = ("_beat", "_deadlines", "_owner", "_owners", "_slots", "number")

    def __init__(
        self, number: int, owner: int, deadlines: Any, owners: Any, slots: Any, beat: Any
    ) -> None:
        """Made by `Board.new_line`."""
        self.number = number
        self._owner = owner
        self._deadlines, self._owners, self._slots, self._beat = deadlines, owners, slots, beat
        owners[number] = owner

    def begin(self, slot: int, deadline: float) -> None:
        """Write what is executed from now on."""
        number = self.number
        self._slots[number] = slot
        self._deadlines[number] = deadline

    def end(self) -> None:
        """Write that nothing is executed."""
        self._beat[0] = time.monotonic()  # first: what was executed may have held up the beats
        self._deadlines[self.number] = 0.0


class _SharedLine(Line):
    """The last line, which may have several owners."""

    __slots__ = ()

    def begin(self, slot: int, deadline: float) -> None:
        """Write what is executed from now on."""
        self._owners[self.number] = self._owner
        super().begin(slot, deadline)
