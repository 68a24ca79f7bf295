"""`FaultyLine`: a bad connection between clients and one server of the longstep protocol."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self

import zmq

from longstep_bindings.testing.line_faults import Faults
from longstep_bindings.transport import private_ipc_address, tidy_ipc

__all__ = ["FaultyLine"]

_LOOK_S = 0.05
_UNKNOWN_BYTE = b"\xc1"  # the one that msgpack never uses

Socket = zmq.Socket[bytes]


class FaultyLine:
    """Passes messages on, and does to some what `faults` says; clients connect to `address` in place of `target`.

    `faults` may be set to others at any time. Closing the line cuts the connection; another line at the same address
    mends it.

    with FaultyLine(server.address, faults=Faults(drop=0.1)) as line:
        client = Client(line.address, service="example.counter", version=1)
    """

    def __init__(
        self,
        target: str,
        address: str | None = None,
        *,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
        target: The server's address.
        address: Where clients connect; None makes a private ipc address.
        faults: How bad the line is; None is not at all.
        seed: Of the draws; which message meets which fault still depends on when messages arrive.
        """
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        """Faults so far, by name."""
        self.num_messages = 0
        """Messages that came so far, from both ends."""
        self._random = random.Random(seed)
        self._target = target
        self._context: zmq.Context[Socket] = zmq.Context()
        self._front = self._open(zmq.ROUTER)
        self._front.bind(address or private_ipc_address())
        self.address = bytes(self._front.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        """Where clients connect."""
        self._backs: dict[bytes, Socket] = {}
        self._routes: dict[Socket, bytes] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._late: list[tuple[float, int, bytes, bool, list[bytes]]] = []
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="longstep-faulty-line", daemon=True)
        self._thread.start()

    @property
    def num_faults(self) -> int:
        """Messages that met a fault so far; slow ones are not counted."""
        return self.counts.total()

    def close(self) -> None:
        """Cut the connection; what is on its way is lost. Idempotent."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # ---- the line's own thread ----

    def _open(self, kind: int) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        return socket

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                until = self._late[0][0] - time.monotonic() if self._late else _LOOK_S
                for socket, _ in self._poller.poll(int(1000 * max(0.0, min(until, _LOOK_S)))):
                    self._receive(socket)
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, route, to_server, frames = heapq.heappop(self._late)
                    self._send(route, to_server, frames)
        finally:
            for socket in (self._front, *self._backs.values()):
                socket.close(0)
            self._context.term()
            tidy_ipc(self.address)

    def _receive(self, socket: Socket) -> None:
        frames = socket.recv_multipart()
        to_server = socket is self._front
        route = frames.pop(0) if to_server else self._routes[socket]
        if to_server and route not in self._backs:  # a client, or its next connection
            back = self._backs[route] = self._open(zmq.DEALER)
            self._routes[back] = route
            back.connect(self._target)
            self._poller.register(back, zmq.POLLIN)
        self.num_messages += 1
        self._meet(route, to_server, frames)

    def _meet(self, route: bytes, to_server: bool, frames: list[bytes]) -> None:
        faults = self.faults
        fault, late_s = self._draw(faults), self._random.random() * faults.late_s
        if fault is not None:
            self.counts[fault] += 1
        if fault == "drop":
            return
        if fault == "corrupt":
            self._damage(frames)
        if fault == "duplicate":
            self._pass(faults.slow_s + late_s, route, to_server, frames)
        self._pass(
            faults.slow_s + (late_s if fault == "reorder" else 0.0), route, to_server, frames
        )

    def _draw(self, faults: Faults) -> str | None:
        draw = self._random.random()
        for name in ("drop", "duplicate", "reorder", "corrupt"):
            draw -= getattr(faults, name)
            if draw < 0.0:
                return name
        return None

    def _damage(self, frames: list[bytes]) -> None:
        index = self._random.randrange(len(frames))
        frame = frames[index]
        is_array = index > 1  # raw bytes, all of which mean something: only its length can be wrong
        cut = is_array or self._random.random() < 0.5
        frames[index] = frame[:-1] if cut else _UNKNOWN_BYTE + frame[1:]

    def _pass(self, wait_s: float, route: bytes, to_server: bool, frames: list[bytes]) -> None:
        if wait_s <= 0.0:
            self._send(route, to_server, frames)
            return
        due = time.monotonic() + wait_s
        heapq.heappush(self._late, (due, next(self._numbers), route, to_server, frames))

    def _send(self, route: bytes, to_server: bool, frames: list[bytes]) -> None:
        if to_server:
            self._backs[route].send_multipart(frames)
        else:
            self._front.send_multipart([route, *frames])
