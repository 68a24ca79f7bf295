"""The program of a worker process: it serves environments until its parent ends it or dies.

The parent writes one message, in the encoding of `wire`, to the standard input and closes it; see `main` for its
entries. The worker answers with one such message to the descriptor `ready_fd`: `{"address": ...}` once it can be reached,
or `{"kind": ..., "message": ...}` for what went wrong.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from longstep_bindings.curve import KeyPair, ServerKeys
from longstep_bindings.envs.board import Board
from longstep_bindings.envs.service import EnvService
from longstep_bindings.envs.spec import EnvSpec
from longstep_bindings.failures import Failure
from longstep_bindings.rpc import Server, Terms
from longstep_bindings.wire import decode, encode

__all__ = ["main"]


def main() -> None:
    """Serve what the standard input describes.

    Entries: `specs` (name to plain EnvSpec), `address` (None: a private ipc one), `parent_pid`, `ready_fd`, `board_fd`,
    `step_timeout_s`, `reset_timeout_s`, `suspects` (what the predecessor was executing when it went down), `terms` and
    `keys` (None, or own public and secret key and the allowed ones).
    """
    orders = decode([sys.stdin.buffer.read()])
    _forget_stdin()
    ready_fd = orders["ready_fd"]
    try:
        server = _server(orders)
    except Exception as error:
        failure = Failure.of(error)
        _tell(ready_fd, {"kind": failure.kind, "message": failure.message})
        sys.exit(1)
    _tell(ready_fd, {"address": server.address})
    gc.collect()
    gc.freeze()  # what was imported stays: nobody need look through it again and again
    server.serve_forever(parent_pid=orders["parent_pid"])


def _server(orders: dict[str, Any]) -> Server:
    specs = {name: EnvSpec.from_plain(plain) for name, plain in orders["specs"].items()}
    board = Board(orders["board_fd"])
    board.start_beating()
    service = EnvService(
        specs,
        board,
        step_timeout_s=orders["step_timeout_s"],
        reset_timeout_s=orders["reset_timeout_s"],
        suspects=orders["suspects"],
    )
    keys = None
    if orders["keys"] is not None:
        public, secret, allowed = orders["keys"]
        own = KeyPair(public=public, secret=secret)
        keys = ServerKeys(own=own, allowed=frozenset(allowed))
    return Server(service, orders["address"], terms=Terms(**orders["terms"]), keys=keys)


def _forget_stdin() -> None:
    """What an environment reads from the standard input is its end."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _tell(ready_fd: int, message: dict[str, Any]) -> None:
    with os.fdopen(ready_fd, "wb") as pipe:
        pipe.write(encode(message)[0])


if __name__ == "__main__":
    main()
