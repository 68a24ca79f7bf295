"""The service `longstep.actor`: an engine's requests, weights and counts for clients elsewhere.

Each client has a *seat*: its requests under way, its finished completions, and the calls that wait for them (`take`). One
thread hands completions out, as many at a time as have come, so that an engine that finishes many at once sends one
message. What takes long (`load`, `score`) runs on threads of its own and never keeps a request waiting.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError, LongstepError, ProtocolError, WeightsError
from longstep.types import Completion, FinishReason
from longstep_bindings.actors.device import DEVICE_METHODS, read_device_info
from longstep_bindings.actors.folders import SHARED_MEMORY, sweep
from longstep_bindings.actors.images import ImageShelf, digest_of
from longstep_bindings.actors.inbox import Inbox
from longstep_bindings.actors.messages import (
    LIMITS,
    SERVICE,
    VERSION,
    pack_completions,
    read_requests,
    read_rows,
)
from longstep_bindings.calls import LATER, Call, Encoded, Session
from longstep_bindings.engines.served import DeviceWeights, ServedEngine
from longstep_bindings.wire import encode

__all__ = ["ActorService", "host_identity"]

_FRESH_S = 30.0
"""A waiting `take` whose deadline is nearer is answered with nothing, so that no completion meets a closed call."""
_LOOK_S = 5.0


def host_identity() -> str:
    """Equal in two processes when they see the same shared memory."""
    with suppress(OSError):
        seen = SHARED_MEMORY.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{seen.st_dev}:{seen.st_ino}"
    return ""


class _Seat:
    """One client: what it waits for and what is ready for it."""

    def __init__(self, session: Session, max_image_bytes: int) -> None:
        self.session = session
        self.open: set[str] = set()
        self.done: list[Completion] = []
        self.takes: deque[Call] = deque()
        self.shelf = ImageShelf(max_image_bytes)
        self.inbox = Inbox()
        self.owner = ""
        """Who this client says it is, to whom the weights may belong that are served."""
        self.is_transferring = False
        """True while the engine holds its requests back for weights of this client."""


class ActorService:
    """See `messages` for the methods."""

    name, version = SERVICE, VERSION

    def __init__(
        self,
        engine: ServedEngine,
        *,
        max_in_flight: int = 256,
        max_image_bytes: int = 1 << 30,
        owner_patience_s: float = 35.0,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Args:
        engine: What answers; closed by its owner.
        max_in_flight: Most requests under way, those of all clients together; what comes beyond is sent back.
        max_image_bytes: Images that are kept for each client.
        owner_patience_s: How long new weights wait for the client to be gone whose weights are served.
        on_failure: Called once, when the engine says that it answers nothing any more.
        """
        self._engine = engine
        self._max_in_flight, self._max_image_bytes = max_in_flight, max_image_bytes
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._seats: dict[int, _Seat] = {}
        self._has_failed = False
        self._is_closed = False
        self._weights = self._weights_owner = ""
        self._owner_patience_s = owner_patience_s
        self._slow = ThreadPoolExecutor(4, thread_name_prefix="longstep-actor-slow")
        self.methods: Mapping[str, Callable[[Call], Any]] = {
            "describe": self._describe,
            "start": self._start,
            "take": self._take,
            "cancel": self._cancel,
            "stats": lambda _: asdict(engine.stats()),
            "score": self._later(self._score),
            "load": self._later(self._load),
            "begin": lambda call: self._seat(call).inbox.begin(_fields(call, "transfer", "files")),
            "chunk": self._chunk,
            "drop": lambda call: self._seat(call).inbox.drop(str(call.value)),
            **{name: self._later(self._device) for name in DEVICE_METHODS},
        }
        self._sender = threading.Thread(target=self._send, name="longstep-actor-send", daemon=True)
        self._sender.start()

    def _seat(self, call: Call) -> _Seat:
        if call.session.state is None:
            call.session.state = _Seat(call.session, self._max_image_bytes)
            with self._changed:
                self._seats[call.session.number] = call.session.state
        return call.session.state

    def _describe(self, call: Call) -> dict[str, Any]:
        if type(call.value) is dict:
            self._seat(call).owner = str(call.value.get("owner", ""))
        return {
            "engine": asdict(self._engine.description),
            "policy_version": self._engine.policy_version,
            "weights": self._weights,
            "max_in_flight": self._max_in_flight,
            "host": host_identity(),
            "pid": os.getpid(),
        }

    # ---- requests ----

    def _start(self, call: Call) -> dict[str, list[str]]:
        seat = self._seat(call)
        brought = _fields(call, "images")["images"]
        for digest, image in brought.items():
            if (
                not isinstance(image, np.ndarray)
                or image.dtype != np.uint8
                or digest_of(image) != digest
            ):
                raise ProtocolError("expected images uint8 under their own digests, got others")
            seat.shelf.put(digest, image)

        def find_image(digest: bytes) -> NDArray[np.uint8] | None:
            found = brought.get(digest)
            return seat.shelf.get(digest) if found is None else found

        requests, missing = read_requests(call.value, find_image)
        with self._changed:
            room = self._max_in_flight - sum(len(each.open) for each in self._seats.values())
            taken, full = requests[: max(0, room)], requests[max(0, room) :]
            twice = seat.open.intersection(request.request_id for request in taken)
            if twice:
                raise ConfigError(f"expected unique request ids, got `{min(twice)}` twice")
            seat.open.update(request.request_id for request in taken)
        for request in taken:
            inner = dataclasses.replace(request, request_id=_inner(seat, request.request_id))
            self._engine.start(inner, lambda done, seat=seat: self._done(seat, done))
        return {"missing": missing, "full": [request.request_id for request in full]}

    def _done(self, seat: _Seat, completion: Completion) -> None:
        """Take a completion from the engine; any thread."""
        name = completion.request_id.partition("/")[2]
        failure = self._engine.failure if completion.finish_reason is FinishReason.ERROR else None
        with self._changed:
            if name not in seat.open:
                return
            if failure is None:
                seat.open.discard(name)
                seat.done.append(dataclasses.replace(completion, request_id=name))
                self._changed.notify_all()
        if failure is not None:
            self._fail(failure)

    def _fail(self, why: str) -> None:
        """Tell the owner, once, that nothing is answered any more."""
        with self._changed:
            fails_now, self._has_failed = not self._has_failed, True
        if fails_now and self._on_failure is not None:
            self._on_failure(why)

    def _take(self, call: Call) -> Any:
        seat = self._seat(call)
        with self._changed:
            seat.takes.append(call)
            self._changed.notify_all()
        return LATER

    def _cancel(self, call: Call) -> None:
        seat = self._seat(call)
        names = [str(name) for name in call.value]
        self._engine.cancel([_inner(seat, name) for name in names])

    def _send(self) -> None:
        """Hand completions to the calls that wait for them, until closed."""
        try:
            self._send_until_closed()
        except BaseException as error:
            self._fail(f"the thread that hands completions out failed: {error!r}")
            raise

    def _send_until_closed(self) -> None:
        while True:
            with self._changed:
                ready = self._ready()
                if not ready:
                    if self._is_closed:
                        return
                    self._changed.wait(_LOOK_S)
                    continue
            for call, completions in ready:
                call.reply(self._answer(completions))

    def _ready(self) -> list[tuple[Call, list[Completion]]]:
        """Calls to answer now with their completions; called with the lock held."""
        ready: list[tuple[Call, list[Completion]]] = []
        stale = time.monotonic() + _FRESH_S
        for seat in self._seats.values():
            while seat.takes and seat.takes[0].cancelled:
                seat.takes.popleft()
            while seat.takes and seat.takes[0].deadline < stale:
                ready.append((seat.takes.popleft(), []))
            if seat.takes and seat.done:
                done, seat.done = seat.done, []
                ready.append((seat.takes.popleft(), done))
        return ready

    def _answer(self, completions: list[Completion]) -> Encoded:
        counts = asdict(self._engine.stats())
        try:
            return Encoded(encode([pack_completions(completions), counts], LIMITS))
        except LongstepError:
            sendable = [_sendable(completion) for completion in completions]
            return Encoded(encode([pack_completions(sendable), counts], LIMITS))

    # ---- what takes long ----

    def _later(self, work: Callable[[Call], Any]) -> Callable[[Call], Any]:
        def run(call: Call) -> None:
            try:
                call.reply(work(call))
            except Exception as error:  # the client's to know
                call.fail(error)
            if self._engine.failure is not None:
                self._fail(self._engine.failure)

        def method(call: Call) -> Any:
            self._seat(call)
            self._slow.submit(run, call)
            return LATER

        return method

    def _chunk(self, call: Call) -> None:
        names = ("transfer", "name", "offset", "data", "checksum")
        self._seat(call).inbox.chunk(_fields(call, *names))

    def _claim(self, owner: str) -> None:
        """Have `owner` be whose weights are served. One that died without a word is waited for."""

        def is_free() -> bool:
            before = self._weights_owner
            return before in ("", owner) or all(
                seat.owner != before for seat in self._seats.values()
            )

        with self._changed:
            if not self._changed.wait_for(is_free, self._owner_patience_s):
                raise WeightsError(
                    "expected weights from the client whose weights are served, got some from another while that one is "
                    "there; an actor follows one trainer at a time: close that one's pool, or serve another actor"
                )
            self._weights_owner = owner

    def _load(self, call: Call) -> int:
        order = _fields(call, "kind", "version", "token")
        if type(order["version"]) is not int or order["version"] < 0:
            raise ProtocolError(f"expected a version of at least 0, got {order['version']!r:.80}")
        self._claim(str(order.get("owner", "")))
        load = {"weights": self._engine.load_weights, "adapter": self._engine.load_adapter}[
            order["kind"]
        ]
        path, transfer = order.get("path"), None
        if path is None:
            transfer = self._seat(call).inbox.take(order["transfer"])
            path = transfer.path
        try:
            load(Path(path), version=order["version"])
        except OSError as error:
            raise WeightsError(f"expected weights at `{path}`, got {error}") from None
        finally:
            if transfer is not None:
                transfer.close()
        self._weights = str(order["token"])
        return self._engine.policy_version

    def _score(self, call: Call) -> list[Any]:
        return list(self._engine.score(read_rows(call.value)))

    def _device(self, call: Call) -> None:
        engine = self._engine
        if not isinstance(engine, DeviceWeights):
            kind = engine.description.engine
            raise ConfigError(
                f'expected an engine that takes weights from a GPU for route="cuda", got `{kind}`; use another route'
            )
        seat = self._seat(call)
        if call.method == "finish_weight_update":
            order = _fields(call, "version", "token")
            engine.finish_weight_update(version=order["version"])
            self._weights, seat.is_transferring = order["token"], False
        elif call.method == "start_weight_update":
            self._claim(seat.owner)
            engine.start_weight_update()
            seat.is_transferring = True
        else:
            getattr(engine, call.method)(read_device_info(call.value))

    # ---- ends ----

    def close_session(self, session: Session) -> None:
        """Withdraw the client's requests and forget its files."""
        seat = session.state
        if isinstance(seat, _Seat):
            with self._changed:
                self._seats.pop(session.number, None)
                self._changed.notify_all()
                names = list(seat.open)
                seat.open.clear()
            self._engine.cancel([_inner(seat, name) for name in names])
            seat.inbox.close()
            if seat.is_transferring:  # nobody else can end it, and until then nothing is answered
                self._fail("a client left in the middle of a transfer of weights")
        sweep(SHARED_MEMORY)

    def close(self) -> None:
        """End the service's threads. Idempotent; the engine stays open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._sender.join()
        self._slow.shutdown(wait=False, cancel_futures=True)


def _inner(seat: _Seat, name: str) -> str:
    """The id under which the engine knows a client's request."""
    return f"{seat.session.number}/{name}"


def _fields(call: Call, *names: str) -> dict[str, Any]:
    value = call.value
    if type(value) is not dict or not all(name in value for name in names):
        raise ProtocolError(
            f"expected `{'`, `'.join(names)}` for `{call.method}`, got {value!r:.80}"
        )
    return value


def _sendable(completion: Completion) -> Completion:
    """The completion, or the error that it cannot travel."""
    try:
        encode(pack_completions([completion]), LIMITS)
    except LongstepError as error:
        return dataclasses.replace(
            completion,
            text="",
            finish_reason=FinishReason.ERROR,
            error=f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode(),
            **_EMPTY,
        )
    return completion


_EMPTY: dict[str, Any] = {
    "prompt_token_ids": np.empty(0, np.int32),
    "token_ids": np.empty(0, np.int32),
    "logprobs": np.empty(0, np.float32),
    "allowed_token_ids": None,
}
