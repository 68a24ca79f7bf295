"""Meeting and asking a process that may die meanwhile: its end is noticed at once, and not by its silence.

Who waits gives `check_there`, which raises when the process is gone or nobody wants it any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from longstep.errors import DeadlineError
from longstep_bindings.client import Client

__all__ = ["ask", "meet"]

_ATTEMPT_S = 2.0
_LOOK_S = 0.05


def meet(
    attempt: Callable[[float], Client],
    *,
    address: str,
    timeout_s: float,
    check_there: Callable[[], None],
) -> Client:
    """A session with the server at an address, by short attempts.

    Args:
        attempt: Opens a session within the seconds that it is given.
        address: Of the server, for the message.
        timeout_s: How long the server may take to answer.
        check_there: See the module.

    Raises:
        DeadlineError: No server answered in time.
        LongstepError: It refuses; or what `check_there` raises.
    """
    end_at = time.monotonic() + timeout_s
    while True:
        left_s = end_at - time.monotonic()
        try:
            return attempt(min(max(left_s, 0.01), _ATTEMPT_S))
        except DeadlineError:
            check_there()
            if left_s <= _ATTEMPT_S:
                raise DeadlineError(
                    f"expected a server at {address} within {timeout_s:g} s, got no answer; it does not run, or does "
                    "not know this client's key"
                ) from None


def ask(
    client: Client, method: str, value: Any, *, timeout_s: float, check_there: Callable[[], None]
) -> Any:
    """The answer of a method that may take long; raises what the method or `check_there` raises."""
    answered = threading.Event()
    pending = client.submit(method, value, timeout_s=timeout_s, on_done=lambda _: answered.set())
    while not answered.wait(_LOOK_S):
        check_there()
    return pending.result()
