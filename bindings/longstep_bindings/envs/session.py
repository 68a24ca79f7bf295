"""Meeting a worker: a session with it, the environments that it is asked for, and what it says of them, checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from longstep.errors import DeadlineError, ProtocolError, SessionLostError
from longstep_bindings.curve import ClientKeys
from longstep_bindings.envs.messages import REPLY_LIMITS, SERVICE, VERSION
from longstep_bindings.rpc import Client
from longstep_bindings.watched import ask, meet

__all__ = ["OPEN_MARGIN_S", "open_session"]

OPEN_MARGIN_S = 5.0
"""Time that opening gets beside what the first environment may take."""


def open_session(
    address: str,
    *,
    environment: str | None,
    num_slots: int,
    owner: int,
    connect_timeout_s: float,
    open_timeout_s: float,
    keys: ClientKeys | None,
    check_there: Callable[[], None],
) -> tuple[Client, dict[str, Any]]:
    """A session with the worker at an address, and the traits of its environments.

    Args:
        address: Of the worker.
        environment: What to ask for; None is the only one it has.
        num_slots: How many of it.
        owner: A number that tells this client's sessions from those of others.
        connect_timeout_s: How long the worker may take to answer.
        open_timeout_s: How long it may take to make the first environment.
        keys: CURVE keys, or None.
        check_there: Raises when the worker is gone; see `watched`.

    Raises:
        DeadlineError: It was not there in time, or its first environment was not.
        ProtocolError: What it says of its environments is not to be understood.
        SessionLostError: It died.
        LongstepError: It refuses, and why.
    """

    def attempt(timeout_s: float) -> Client:
        return Client(
            address,
            service=SERVICE,
            version=VERSION,
            connect_timeout_s=timeout_s,
            keys=keys,
            limits=REPLY_LIMITS,
        )

    client = meet(attempt, address=address, timeout_s=connect_timeout_s, check_there=check_there)
    order = {
        "environment": environment,
        "num_slots": num_slots,
        "owner": owner,
        "compact_columns": True,
    }
    began = time.monotonic()
    try:
        traits = ask(client, "open", order, timeout_s=open_timeout_s, check_there=check_there)
        return client, _check_traits(traits, num_slots)
    except (DeadlineError, SessionLostError) as error:
        client.close()
        is_early = time.monotonic() - began < open_timeout_s - OPEN_MARGIN_S
        if is_early and not isinstance(error, DeadlineError):
            raise  # else it was killed for being late
        raise DeadlineError(
            f"expected the first environment within {open_timeout_s:g} s: {error}; allow more, or look for what it "
            "waits for"
        ) from None
    except BaseException:
        client.close()
        raise


def _check_traits(traits: Any, num_slots: int) -> dict[str, Any]:
    """What a worker says of its environments, checked."""
    with suppress(TypeError, KeyError, ValueError):
        fits = traits["kind"] in ("agent", "raw") and all(
            type(traits[name]) is bool for name in ("blocking", "has_board", "can_copy")
        )
        limits = [float(traits[name]) for name in ("step_timeout_s", "reset_timeout_s")]
        suspects = traits["suspects"]
        known = all(slot in range(num_slots) and type(why) is str for slot, why in suspects)
        if fits and known and all(0.0 < limit < 1e7 for limit in limits):
            return traits
    raise ProtocolError("expected the traits of an environment in answer to `open`")
