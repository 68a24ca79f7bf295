"""Ends processes whose parent died without ending them. Run as a program, by `launch`; needs the standard library only.

The parent writes lines to this process's standard input: `+ PID` for a process to watch over, `- PID` to forget one. When
the input ends, or the parent is seen to be gone, the watched processes get a moment to end by themselves; what is left,
each with the whole process group it leads, is killed, and the private folders named after them are removed.

A process that hangs in native code, or is stopped, cannot do that for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

POLL_S = 0.25
GRACE_S = 1.5
TRACKER_GRACE_S = 2.0


def main(parent_pid: int) -> None:
    """Watch until the parent is gone, then clean up.

    Args:
        parent_pid: The process that started this one.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # ends with its parent and not before
    watched = watch(parent_pid)
    end_at = time.monotonic() + GRACE_S
    while any(map(is_running, watched)) and time.monotonic() < end_at:
        time.sleep(0.05)
    for pid in watched:
        kill_group(pid)
        remove_folders(pid)
    if watched:  # the parent died: one that ends its children properly has forgotten them
        remove_folders(parent_pid)


def watch(parent_pid: int) -> list[int]:
    """The processes that were watched over at the moment the parent went."""
    watched: set[int] = set()
    buffer = b""
    while True:
        is_there = os.getppid() == parent_pid  # before the input, of which the last is to be read
        if not select.select([0], [], [], POLL_S if is_there else 0.0)[0]:
            if is_there:
                continue
            break
        data = os.read(0, 4096)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            sign, pid = line.split()
            (watched.add if sign == b"+" else watched.discard)(int(pid))
    return sorted(watched)


def kill_group(leader_pid: int) -> None:
    """Kill a process group, all at once but for `multiprocessing`'s resource trackers.

    A tracker removes the semaphores and shared memory of its processes once all of them are gone, and then ends; it gets
    a moment for that, for nobody else knows their names.
    """
    members = group_members(leader_pid)
    trackers = [pid for pid in members if is_resource_tracker(pid)]
    if trackers:
        for pid in members:
            if pid not in trackers:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        end_at = time.monotonic() + TRACKER_GRACE_S
        while any(map(is_running, trackers)) and time.monotonic() < end_at:
            time.sleep(0.005)
    with contextlib.suppress(OSError):
        os.killpg(leader_pid, signal.SIGKILL)


def group_members(leader_pid: int) -> list[int]:
    """Processes in a group; none where the system does not tell."""
    members: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[2]) == leader_pid:
                members.append(int(folder.name))
    return members


def is_resource_tracker(pid: int) -> bool:
    """True for the process in which `multiprocessing` remembers what is to be removed."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_running(pid: int) -> bool:
    """True while the process is there; one that has ended and was not collected is not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        return True  # not Linux: there is no such file
    return state != b"Z"


def remove_folders(pid: int) -> None:
    """Remove the folders that `transport` (sockets) and `actors.folders` (weights) made in that process."""
    for root in {tempfile.gettempdir(), "/tmp", "/dev/shm"}:
        for kind in ("ipc", "weights"):
            for folder in Path(root).glob(f"longstep-{kind}-{pid}-*"):
                if not is_held(folder / ".lock"):
                    shutil.rmtree(folder, ignore_errors=True)


def is_held(lock: Path) -> bool:
    """True while a process holds a lock file: one of another container may have the same id."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
