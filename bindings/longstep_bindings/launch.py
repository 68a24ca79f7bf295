"""Processes on this machine that end when they are told to, and when this process ends in whatever way.

A `Child` leads a process group of its own, so that what it starts can be ended with it, and Ctrl-C in a terminal does
not reach it. Beside the children runs one small `reaper` process as long as there are children: it notices the death of
this process, also by SIGKILL, and ends what is left, also what hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from longstep_bindings import reaper

__all__ = ["Child"]

_POLL_S = 0.005


class Child:
    """One process, started at construction.

    >>> child = Child([sys.executable, "-c", "pass"])
    >>> child.wait(10.0), child.exit_text()
    (True, 'ended with exit code 0')
    >>> child.end()
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environ: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        output: int | None = None,
    ) -> None:
        """Args:
        command: Program and arguments.
        stdin: What it can read from its standard input; it reads soon, or it is little.
        environ: Environment variables beside those of this process.
        pass_fds: File descriptors that it inherits under the same numbers.
        output: File descriptor that its output and its errors go to; None is where those of this process go.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={**os.environ, **(environ or {})},
            pass_fds=pass_fds,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        _reapers.watch(self.pid)
        self._parent_pid = os.getpid()
        self._is_ended = False
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # it died at once
            pipe.write(stdin)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        """True once it has ended. Its id is kept from being given to another until `end`."""
        if self._process.returncode is not None:
            return True
        if not hasattr(os, "waitid"):  # before Python 3.13 not everywhere
            return self._process.poll() is not None
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, waiting for that at most `timeout_s`."""
        end_at = time.monotonic() + timeout_s
        while not self.has_exited:
            if time.monotonic() >= end_at:
                return False
            time.sleep(_POLL_S)
        return True

    @property
    def _is_mine(self) -> bool:
        """False in a fork of the process that started it, whose end is not to end it."""
        return os.getpid() == self._parent_pid

    def terminate(self) -> None:
        """Ask it to end: SIGTERM."""
        if not self._is_mine or self.has_exited:
            return
        os.kill(self.pid, signal.SIGTERM)

    def end(self, grace_s: float = 0.0) -> None:
        """End it and everything in its process group. Idempotent.

        Args:
            grace_s: How long to wait for it after an earlier `terminate`, before it is killed.
        """
        if not self._is_mine or self._is_ended:
            return
        self.wait(grace_s)
        reaper.kill_group(self.pid)  # before its id is free for another
        self._process.wait()
        self._is_ended = True
        _reapers.forget(self.pid)

    def exit_text(self) -> str:
        """How it ended, as `was killed by SIGKILL`; only once it `has_exited`."""
        code = self._process.wait() if self._is_ended else self._exit_code()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _exit_code(self) -> int:
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.wait()
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


class _Reapers:
    """The reaper process of this process, while it has children."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, pid: int) -> None:
        with self._lock:
            self._pids.add(pid)
            if self._process is None or self._process.poll() is not None:
                self._start()
            else:
                self._tell(f"+ {pid}\n")

    def forget(self, pid: int) -> None:
        with self._lock:
            self._pids.discard(pid)
            if self._process is None:
                return
            self._tell(f"- {pid}\n")
            if not self._pids:
                assert self._process.stdin is not None
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
                self._process.wait()
                self._process = None

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        for pid in self._pids:
            self._tell(f"+ {pid}\n")

    def _tell(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed; the next `watch` starts another
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


_reapers = _Reapers()
_inherited: list[_Reapers] = []


def _forget_in_fork() -> None:
    """A fork has no children yet; those of its parent are not its to watch over."""
    global _reapers
    _inherited.append(_reapers)  # to be collected would be a warning of a process that still runs
    _reapers = _Reapers()


os.register_at_fork(after_in_child=_forget_in_fork)
