"""Folders for weights on their way: in shared memory where there is room, gone with the process that made them.

A folder is named after its process and holds a lock file that the process keeps locked. It goes when it is closed; when
its process is killed, the `reaper` removes it, or `sweep` the next time that anybody looks. A lock, unlike a process id,
tells the truth between containers that share their memory file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from longstep.errors import WeightsError

__all__ = ["SHARED_MEMORY", "ScratchFolder", "has_room", "sweep"]

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "longstep-weights-"
_LOCK = ".lock"
_YOUNG_S = 60.0
"""Age up to which a folder without a lock file may still be about to get one."""


class ScratchFolder:
    """A folder of this process's own."""

    def __init__(self, root: Path) -> None:
        """Args:
            root: Where to make it.

        Raises:
            OSError: There is no room, or nothing can be made there.
        """
        sweep(root)
        self.path, self._lock = _locked_folder(root)

    def close(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked_folder(root: Path) -> tuple[Path, int]:
    """A new folder and the descriptor of its lock file, which is held."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        lock = -1
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _holds(lock, path / _LOCK):
                return path, lock
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
            raise
        os.close(lock)


def _holds(lock: int, path: Path) -> bool:
    """Take the lock; False when a `sweep` was faster, for which a file without a holder is a dead process's."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), path.stat())
    return False


def sweep(root: Path) -> None:
    """Remove this user's folders below `root` whose processes are gone."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            try:
                lock = os.open(folder / _LOCK, os.O_RDWR)
            except FileNotFoundError:
                if time.time() - folder.stat().st_mtime > _YOUNG_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def has_room(root: Path, num_bytes: int) -> bool:
    """True when a file of that size fits below `root`, with a little to spare; what dead processes left goes first."""
    wanted = num_bytes + (num_bytes >> 6) + (1 << 16)
    if _num_free_bytes(root) <= wanted:
        sweep(root)
    return _num_free_bytes(root) > wanted


def _num_free_bytes(root: Path) -> int:
    try:
        room = os.statvfs(root)
    except OSError:
        return -1
    return room.f_bavail * room.f_frsize


def no_room(root: Path, num_bytes: int, error: OSError | None = None) -> WeightsError:
    """The error that tells of a full file system."""
    why = f": {error}" if error is not None and error.errno != errno.ENOSPC else ""
    return WeightsError(
        f"expected room for {num_bytes / 2**20:.1f} MiB of weights at `{root}`, which is full{why}; make room "
        '(in a container: a larger shared memory), or send them by route="wire"'
    )
