"""A child process that ends when its parent does, however the parent ends.

Two ways at once: on Linux the kernel signals the parent's death (`prctl(PR_SET_PDEATHSIG)`), and everywhere a thread
looks at the parent's process id four times a second. The kernel signals already when the *thread* that started the child
ends, so its signal only makes us look; a real-time signal is used, which nothing else sends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from longstep_bindings.waker import Waker

__all__ = ["follow_parent"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.25


def follow_parent(
    parent_pid: int,
    on_death: Callable[[], None],
    *,
    before_exit: Callable[[], None],
    grace_s: float = 3.0,
) -> None:
    """Call `on_death` once the parent is dead, and end this process `grace_s` later if it has not ended by then.

    Args:
        parent_pid: The parent as the parent itself knew it; it may be dead already.
        on_death: Begins an orderly end; runs in a thread of its own.
        before_exit: What must be done even if the orderly end hangs, such as removing a socket file.
        grace_s: How long an orderly end may take.
    """
    look = Waker()
    if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
        number = signal.SIGRTMIN + 3
        signal.signal(number, lambda *_: look.wake())
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent_pid:
            select.select([look], [], [], _POLL_S)
            look.clear()
        on_death()
        time.sleep(grace_s)
        before_exit()
        os._exit(1)

    threading.Thread(target=watch, name="longstep-follow-parent", daemon=True).start()
