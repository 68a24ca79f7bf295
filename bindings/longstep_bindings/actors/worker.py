"""The program of an actor process: it opens an engine and serves it until its parent ends it or dies.

The parent writes one message, in the encoding of `wire`, to the standard input and closes it; see `main` for its
entries. The actor answers with one such message to the descriptor `ready_fd`: `{"address": ...}` once its model is loaded
and it can be reached, or `{"kind": ..., "message": ...}` for what went wrong, in full.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NoReturn

from longstep.errors import LongstepError
from longstep_bindings.actors.server import ActorServer
from longstep_bindings.curve import KeyPair, ServerKeys
from longstep_bindings.engines.opening import open_engine
from longstep_bindings.failures import Failure
from longstep_bindings.lifeline import follow_parent
from longstep_bindings.wire import decode, encode

__all__ = ["main"]


def main() -> None:
    """Serve what the standard input describes.

    Entries: `engine`, `model`, `options`, `address` (None: a private ipc one), `parent_pid`, `ready_fd`,
    `max_in_flight`, `lost_after_s` and `keys` (None, or own public and secret key and the allowed ones).
    """
    orders = decode([sys.stdin.buffer.read()])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.set_inheritable(orders["ready_fd"], False)
    unanswered = [orders["ready_fd"]]
    # Engines fork: a child that kept the pipe open would keep the parent waiting for its end.
    os.register_at_fork(after_in_child=lambda: [os.close(fd) for fd in unanswered])
    _end_with(orders["parent_pid"])
    try:
        server = _server(orders)
    except BaseException as error:
        failure = Failure.of(error)
        message = failure.message
        if not isinstance(error, LongstepError):
            message = f"{message}\n{''.join(traceback.format_exception(error))}"
        _tell(orders["ready_fd"], {"kind": failure.kind, "message": message})
        _leave(1)
    _tell(orders["ready_fd"], {"address": server.address})
    unanswered.clear()
    code = 0
    try:
        server.serve_forever(parent_pid=orders["parent_pid"])
    except LongstepError as error:
        print(f"actor: {error}", file=sys.stderr)
        code = 1
    _leave(code)


def _end_with(parent_pid: int) -> None:
    """While the engine loads, which takes minutes: end at once when the parent does."""
    follow_parent(parent_pid, lambda: None, before_exit=lambda: None, grace_s=5.0)


def _server(orders: dict[str, Any]) -> ActorServer:
    keys = None
    if orders["keys"] is not None:
        public, secret, allowed = orders["keys"]
        keys = ServerKeys(own=KeyPair(public=public, secret=secret), allowed=frozenset(allowed))
    engine = open_engine(orders["engine"], orders["model"], **orders["options"])
    try:
        return ActorServer(
            engine,
            orders["address"],
            max_in_flight=orders["max_in_flight"],
            lost_after_s=orders["lost_after_s"],
            keys=keys,
        )
    except BaseException:
        engine.close()
        raise


def _tell(ready_fd: int, message: dict[str, Any]) -> None:
    with os.fdopen(ready_fd, "wb") as pipe:
        pipe.write(encode(message)[0])


def _leave(code: int) -> NoReturn:
    """End now: threads of an engine's runtime must not keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
