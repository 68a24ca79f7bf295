"""Processes in trouble: killed, stopped, and how to see that they are. Linux has all of it, other systems lack `state_of`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longstep.errors import DeadlineError

__all__ = ["hang", "is_gone", "kill", "resume", "state_of", "wait_until"]

_LOOK_S = 0.01


def kill(pid: int) -> None:
    """End a process at once, by SIGKILL, and wait until it is gone. One that is gone already stays so."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))


def hang(pid: int) -> None:
    """Stop a process where it is, by SIGSTOP: it holds its sockets and answers nothing until `resume`, or for ever."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) in ("T", "Z", ""))


def resume(pid: int) -> None:
    """Let a process go on after `hang`; one that is gone stays so."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    """The letter of `ps`: R, S, T when stopped, Z when dead and not collected; empty when gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(pid: int) -> bool:
    """True when a process has ended, collected or not."""
    return state_of(pid) in ("Z", "X", "")


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until `condition()` is true.

    Raises:
        DeadlineError: It was not within `timeout_s`.
    """
    end_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_at:
            raise DeadlineError(
                f"expected a condition to be true within {timeout_s:g} s, it is not: {condition}"
            )
        time.sleep(_LOOK_S)
