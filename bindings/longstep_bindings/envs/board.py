"""The deadline board: what a worker is executing right now and until when it may, readable by the process that started it.

A worker that hangs in native code, or was stopped, cannot report that it is late; one that was killed cannot report
which environment it was executing. So it writes both, before each step, into memory that its parent sees: a file
without a name, mapped by both. Nothing of it remains when both are gone.

A *line* of the board belongs to one thread of the worker. Times are `time.monotonic`, which one machine has once.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

__all__ = ["Board", "new_board_file"]

_NUM_LINES = 4096
_SIZE_BYTES = _NUM_LINES * 24


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
        self._slots = view[_NUM_LINES * 16 :].cast("q")
        view.release()
        self._num_lines = 0

    def new_line(self) -> int:
        """A line for one more thread; threads beyond the last share it, and are not seen by all."""
        self._num_lines += 1
        return min(self._num_lines, _NUM_LINES) - 1

    def begin(self, line: int, owner: int, slot: int, deadline: float) -> None:
        """Write what the thread of `line` executes from now on."""
        self._owners[line] = owner
        self._slots[line] = slot
        self._deadlines[line] = deadline

    def end(self, line: int) -> None:
        """Write that it executes nothing."""
        self._deadlines[line] = 0.0

    def running(self) -> list[tuple[float, int, int]]:
        """What is executed: deadline, owner and slot."""
        lines = np.flatnonzero(np.asarray(self._deadlines)).tolist()
        return [(self._deadlines[i], self._owners[i], self._slots[i]) for i in lines]

    def close(self) -> None:
        """Unmap."""
        for view in (self._deadlines, self._owners, self._slots):
            view.release()
        self._memory.close()
