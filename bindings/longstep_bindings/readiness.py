"""How a child process says that it serves: one message through a pipe, with its address or with what went wrong."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from longstep.errors import DeadlineError, LongstepError
from longstep_bindings.failures import Failure, raisable
from longstep_bindings.launch import Child
from longstep_bindings.wire import decode

__all__ = ["await_address", "ended_text"]

_LOOK_S = 0.1


def await_address(
    child: Child,
    ready: int,
    *,
    what: str,
    error: type[LongstepError],
    timeout_s: float,
    end_grace_s: float,
    closing: threading.Event | None,
    tail: Callable[[], str] = lambda: "",
) -> str:
    """The address at which a child serves, once it says so.

    Args:
        child: The process.
        ready: Descriptor of the pipe's end for reading. The child's own end is closed here.
        what: What the child is, as `worker`.
        error: Raised when it ends, or is given up, before it is ready.
        timeout_s: Seconds until it must be ready.
        end_grace_s: Seconds that it gets to end after its last message.
        closing: Once set, the start is given up.
        tail: The end of its output, for messages.

    Raises:
        DeadlineError: It was not ready in time.
        LongstepError: `error`, or what the child said.
    """
    data = b""
    end_at = time.monotonic() + timeout_s
    while True:
        left_s = end_at - time.monotonic()
        if left_s <= 0.0:
            raise DeadlineError(
                f"expected {what} to be ready within {timeout_s:g} s; raise `start_timeout_s` if its imports or its "
                f"model take longer to load{tail()}"
            )
        if closing is not None and closing.is_set():
            raise error(f"{what} was closed before it was ready")
        if not select.select([ready], [], [], min(left_s, _LOOK_S))[0]:
            continue
        part = os.read(ready, 65536)
        if not part:
            break
        data += part
    if not data:
        child.wait(end_grace_s)
        raise error(f"{what} {ended_text(child)} before it was ready{tail() or '; see its output'}")
    told: Any = decode([data])
    if "address" not in told:
        child.wait(end_grace_s)
        raise raisable(Failure(told["kind"], told["message"] + tail()), f"{what} that was started")
    return told["address"]


def ended_text(child: Child) -> str:
    """How a child ended, or that it is of no more use though it runs."""
    return child.exit_text() if child.has_exited else "closed its pipe"
