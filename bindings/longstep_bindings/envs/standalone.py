"""An environment server in one file, for interpreters in which longstep cannot be installed.

Needs Python 3.8 or newer, pyzmq and msgpack, and nothing else; arrays travel where numpy is installed. It serves any
environment with `reset` and `step`, of Gymnasium or of the old Gym (four values, a bare observation), as it is:
observations, actions and infos untouched. Prompt, memory and parser live in the process that trains.

    python standalone.py my_package.envs:MyEnv --kwargs '{"size": 8}' --address ipc:///run/user/1000/env

PROTOCOL.md specifies what travels, and this file keeps all of it: limits, deadlines, each step exactly once. One thread
owns the socket, so that a hanging environment cannot silence it; the main thread runs the environments. An address that
other machines can reach requires CURVE keys, made with `longstep keys new`:

    python standalone.py my_package.envs:MyEnv --address tcp://*:5555 --keys server.key_secret --allow trainer.key

In this order: errors, bodies, heads, the book of a session, keys, the server, the environments, the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import math
import os
import queue
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from typing import Any, Callable, Sequence

import msgpack
import zmq

np: Any
try:
    np = importlib.import_module("numpy")
except ImportError:
    np = None

pack: Any = msgpack.packb
MIB = 1 << 20
LIMITS = {
    "max_head_bytes": 64 * 1024,
    "max_body_bytes": 16 * MIB,
    "max_frame_bytes": 64 * MIB,
    "max_frames": 1024,
    "max_message_bytes": 256 * MIB,
    "max_depth": 32,
    "max_items": MIB,
}
"""What is taken in; the client is told so in the handshake."""
REPLY_LIMITS = {
    "max_body_bytes": 256 * MIB,
    "max_frame_bytes": 256 * MIB,
    "max_frames": 16384,
    "max_message_bytes": 1024 * MIB,
    "max_depth": 32,
    "max_items": 256 * MIB,
}
"""What a client of an environment service takes in."""


# ---- errors -----------------------------------------------------------------------------------------------------------


class Fault(Exception):
    """An error that crosses the wire; `kind` is the name of a class of `longstep.errors`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def malformed(message: str) -> Fault:
    """What a peer gets for a message that breaks the protocol."""
    return Fault("ProtocolError", message)


def fields_of(error: BaseException) -> list[str]:
    """Kind, message and place of an error, as they travel."""
    kind = error.kind if isinstance(error, Fault) else "LongstepError"
    message = str(error) if isinstance(error, Fault) else f"{type(error).__name__}: {error}"
    where = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        name = os.path.basename(frames[-1].filename)
        where = f"{name}:{frames[-1].lineno} in {frames[-1].name}"
    return [kind, valid_text(message)[:8000], valid_text(where)[:400]]


def valid_text(text: str) -> str:
    """The text with what UTF-8 cannot encode replaced."""
    return text.encode("utf-8", "replace").decode()


# ---- bodies -----------------------------------------------------------------------------------------------------------

DTYPE = re.compile(r"[|<](b1|[iu][1248]|f[248]|c8|c16)")
MARKS = {tuple: b"t", set: b"s", frozenset: b"f"}
INLINE_BYTES = 4096


def encode(value: Any) -> list[bytes]:
    """The frames of a value: the body, then one for each large array.

    Raises:
        Fault: It cannot travel; the message names the place.
    """
    frames: list[bytes] = []
    body = pack(plain(value, "$", 0, frames))
    if len(body) > REPLY_LIMITS["max_items"]:
        check_complete(body, REPLY_LIMITS["max_depth"], REPLY_LIMITS["max_items"])
    encoded = [body, *frames]
    check_sizes(encoded, REPLY_LIMITS)
    return encoded


def plain(value: Any, place: str, depth: int, frames: list[bytes]) -> Any:
    """What msgpack packs in place of `value`; the bytes of large arrays go to `frames`."""
    kind = type(value)
    if value is None or kind is bool or kind is bytes:
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise untransportable("text that UTF-8 can encode", repr(value), place) from None
        return text
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return plain_array(value, place, frames)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise untransportable("an integer of at most 64 bits", f"{value:.3g}", place)
        return int(value)
    if isinstance(value, float):
        if value != value:
            raise untransportable("a number", "NaN", place)
        return float(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if depth == LIMITS["max_depth"]:
        raise untransportable(f"at most {depth} nested containers", "more", place)
    if isinstance(value, dict):
        return {
            plain_key(key, place): plain(item, f"{place}.{key}", depth + 1, frames)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [
            plain(item, f"{place}[{index}]", depth + 1, frames) for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else [msgpack.ExtType(3, b"t"), *items]
    if isinstance(value, (set, frozenset)):
        members = sorted(value, key=lambda member: (type(member).__name__, member))
        mark = msgpack.ExtType(3, b"s" if isinstance(value, set) else b"f")
        return [mark, *(plain_key(member, place) for member in members)]
    raise untransportable(
        "None, bool, int, float, str, bytes, list, tuple, set, dict or a numpy array of numbers",
        kind.__name__,
        place,
    )


def plain_key(key: Any, place: str) -> Any:
    """What is packed for a key of a map or a member of a set."""
    is_scalar = key is None or isinstance(key, (str, int, float, bytes))
    if not is_scalar and np is not None and isinstance(key, np.generic):
        is_scalar = np.dtype(type(key)).kind in "biuf"
    if not is_scalar:
        raise untransportable("a key that is a scalar", type(key).__name__, "a key of " + place)
    return plain(key, "a key of " + place, 0, [])


def plain_array(value: Any, place: str, frames: list[bytes]) -> msgpack.ExtType:
    """The ext value that stands for an array or a numpy scalar."""
    dtype = value.dtype if value.dtype.byteorder == "|" else value.dtype.newbyteorder("<")
    if DTYPE.fullmatch(dtype.str) is None or value.ndim > 16:
        got = f"dtype {value.dtype} with {value.ndim} dimensions"
        raise untransportable("an array of booleans or numbers", got, place)
    is_scalar = isinstance(value, np.generic)
    if is_scalar and value != value:
        raise untransportable("a number", "NaN", place)
    data = np.asarray(value).astype(dtype, copy=False).tobytes()
    shape = None if is_scalar else list(value.shape)
    if len(data) <= INLINE_BYTES:
        return msgpack.ExtType(2, pack([dtype.str, shape]) + data)
    frames.append(data)
    return msgpack.ExtType(1, pack([len(frames) - 1, dtype.str, shape]))


def untransportable(expected: str, got: str, place: str) -> Fault:
    """The error for a value that cannot travel."""
    message = f"expected {expected}, got {got:.100} at {place:.300}; convert it"
    return Fault("UnsupportedTypeError", message)


def decode(frames: Sequence[bytes]) -> Any:
    """The value of a message's body and raw frames.

    Raises:
        Fault: The frames break the protocol. No other error is raised.
    """
    if not frames:
        raise malformed("expected a body frame, got none")
    check_sizes(frames, LIMITS)
    check_complete(frames[0], LIMITS["max_depth"], LIMITS["max_items"])
    unread = set(range(len(frames) - 1))
    try:
        value = msgpack.unpackb(
            frames[0],
            ext_hook=lambda code, payload: read_ext(code, payload, frames[1:], unread),
            list_hook=unmark,
            object_hook=check_map,
            strict_map_key=False,
        )
    except Fault:
        raise
    except Exception as error:  # msgpack and numpy raise several unrelated classes
        raise malformed(f"expected a valid body, got {type(error).__name__}") from None
    if type(value) is Mark:
        raise malformed("expected a value, got a bare mark")
    if unread:
        raise malformed(f"expected every raw frame to be used, frame {min(unread)} is not")
    return value


class Mark:
    """Stands at the head of a decoded list that was something else."""

    __slots__ = ("kind",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: bytes) -> None:
        self.kind = kind


def unmark(items: list[Any]) -> Any:
    """The tuple or set that a marked list stands for; other lists as they are."""
    kind = items.pop(0).kind if items and type(items[0]) is Mark else b""
    if any(type(item) is Mark for item in items):
        raise malformed("expected a mark only as the first element of an array")
    if kind == b"":
        return items
    if kind == b"t":
        return tuple(items)
    if kind not in (b"s", b"f"):
        raise malformed("expected mark t, s or f")
    check_scalars(items)
    members = set(items) if kind == b"s" else frozenset(items)
    if len(members) != len(items):
        raise malformed("expected the members of a set to differ")
    return members


def check_map(items: dict[Any, Any]) -> dict[Any, Any]:
    """The map itself, if its keys are scalars and no mark is among its values."""
    check_scalars(items)
    if any(type(item) is Mark for item in items.values()):
        raise malformed("expected a mark only as the first element of an array")
    return items


def check_scalars(keys: Any) -> None:
    """Raise for what may not be a key of a map or a member of a set."""
    for key in keys:
        is_scalar = key is None or type(key) in (bool, int, float, str, bytes)
        if not is_scalar and np is not None and isinstance(key, np.generic):
            is_scalar = np.dtype(type(key)).kind in "biuf"
        if not is_scalar:
            raise malformed("expected keys of maps and members of sets to be scalars")


def read_ext(code: int, payload: bytes, frames: Sequence[bytes], unread: set[int]) -> Any:
    """The array, numpy scalar or mark that an ext value stands for."""
    if code == 3:
        return Mark(payload)
    if code not in (1, 2):
        raise malformed(f"expected ext code 1, 2 or 3, got {code}")
    if np is None:
        raise malformed("expected no arrays: numpy is not installed in this interpreter")
    unpacker = msgpack.Unpacker(max_buffer_size=256, max_array_len=16, max_map_len=0)
    unpacker.feed(payload[:256])
    header = unpacker.unpack()
    if code == 2:
        dtype, shape = header
        data: Any = memoryview(payload)[unpacker.tell() :]
    else:
        index, dtype, shape = header
        if type(index) is not int or index not in unread or unpacker.tell() != len(payload):
            raise malformed("expected the index of an unused raw frame")
        unread.remove(index)
        data = frames[index]
    if code == 2 and shape is None:
        return view(data, dtype, [])[()]
    return view(data, dtype, shape)


def view(data: Any, dtype: Any, shape: Any) -> Any:
    """A read-only array on received bytes."""
    if type(dtype) is not str or DTYPE.fullmatch(dtype) is None:
        raise malformed("expected a dtype such as `<f4`")
    itemsize = np.dtype(dtype).itemsize
    if (itemsize == 1) != (dtype[0] == "|"):
        raise malformed("expected `|` for one byte and `<` for more")
    if type(shape) is not list or len(shape) > 16:
        raise malformed("expected at most 16 dimensions")
    if any(type(size) is not int or not 0 <= size < 1 << 40 for size in shape):
        raise malformed("expected sizes from 0 to 2**40")
    num_bytes = itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes != len(data) or (not num_bytes and max(shape) >= 1 << 31):
        raise malformed(f"expected {num_bytes} bytes for an array, got {len(data)}")
    array = np.frombuffer(data, dtype).reshape(shape) if num_bytes else np.empty(shape, dtype)
    array.flags.writeable = False
    return array


def check_sizes(frames: Sequence[bytes], limits: dict[str, int]) -> None:
    """Raise when the body, a raw frame, their number or their sum exceeds the limits."""
    sizes = [len(frame) for frame in frames]
    for name, got in (
        ("max_body_bytes", sizes[0]),
        ("max_frames", len(sizes) - 1),
        ("max_frame_bytes", max(sizes[1:], default=0)),
        ("max_message_bytes", sum(sizes)),
    ):
        if got > limits[name]:
            raise malformed(f"expected at most {limits[name]} as {name}, got {got}")


FIXED_BYTES = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""Bytes after the first, of values whose size the first byte says."""
SIZED_BYTES = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
"""Bytes of the length field and bytes besides the length, of bin, ext and str."""
COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count field and members per count, of arrays and maps."""


def check_complete(body: bytes, max_depth: int, max_items: int) -> None:
    """Raise unless `body` is one whole msgpack value within the limits; builds nothing."""
    position, num_items, size = 0, 0, len(body)
    remaining = [1]  # members still to come of each open container
    while remaining:
        if remaining[-1] == 0:
            remaining.pop()
            continue
        remaining[-1] -= 1
        num_items += 1
        if num_items > max_items or position >= size:
            raise malformed(f"expected a whole body of at most {max_items} values")
        position, num_members = read_size(body, position)
        if position > size:
            raise malformed("expected a whole msgpack value, got a truncated one")
        if num_members is not None:
            remaining.append(num_members)
            if len(remaining) - 1 > max_depth:
                raise malformed(f"expected at most {max_depth} nested containers")
    if position != size:
        raise malformed("expected one msgpack value, got bytes after it")


def read_size(body: bytes, position: int) -> tuple[int, int | None]:
    """Position after the value that starts at `position`, and its number of members if it is a container."""
    first = body[position]
    position += 1
    if first < 0x80 or first >= 0xE0:
        return position, None
    if first < 0x90:
        return position, 2 * (first & 0x0F)
    if first < 0xA0:
        return position, first & 0x0F
    if first < 0xC0:
        return position + (first & 0x1F), None
    if first in FIXED_BYTES:
        return position + FIXED_BYTES[first], None
    if first in SIZED_BYTES:
        width, extra = SIZED_BYTES[first]
        length = int.from_bytes(body[position : position + width], "big")
        return position + width + length + extra, None
    if first in COUNTED:
        width, members = COUNTED[first]
        return position + width, members * int.from_bytes(body[position : position + width], "big")
    raise malformed("expected msgpack, got the unused byte 0xc1")


# ---- heads ------------------------------------------------------------------------------------------------------------

HELLO, WELCOME, REFUSED, REQUEST, REPLY, ERROR, PING, PONG, CANCEL, LOST, BYE = range(1, 12)
MAX_OPEN = 4096


def pack_head(kind: int, token: bytes, *fields: Any) -> bytes:
    """The first frame of a message."""
    return pack([1, kind, token, *fields])


def read_head(frame: bytes) -> tuple[int, bytes, list[Any]]:
    """Kind, token and fields of a client's message.

    Raises:
        Fault: It is none; its `token` is what an answer has to carry, if the version is another.
    """
    if len(frame) > LIMITS["max_head_bytes"]:
        raise malformed("expected a shorter head")
    check_complete(frame, 4, len(frame))
    try:
        parts = msgpack.unpackb(frame, max_array_len=MAX_OPEN, max_map_len=256)
    except Exception as error:  # the parser's own errors, of several unrelated classes
        raise malformed(f"expected msgpack, got {type(error).__name__}") from None
    if type(parts) is not list or len(parts) < 3:
        raise malformed("expected a head [version, kind, token, ...]")
    version, kind, token, fields = parts[0], parts[1], parts[2], parts[3:]
    if type(token) is not bytes or len(token) != 16:
        raise malformed("expected a token of 16 bytes")
    if type(version) is not int or version != 1:
        fault = malformed(f"expected protocol version 1, got {version!r:.40}; use the same version")
        fault.token = token  # type: ignore[attr-defined]
        raise fault
    checks = FIELDS.get(kind) if type(kind) is int else None
    if checks is None or len(fields) != len(checks):
        raise malformed("expected a client's message")
    if not all(check(field) for check, field in zip(checks, fields)):
        raise malformed(f"expected other fields in a head of kind {kind}")
    return kind, token, fields


def is_count(value: Any) -> bool:
    """True for an integer from 0 to 2^53."""
    return type(value) is int and 0 <= value <= 1 << 53


def is_counts(value: Any) -> bool:
    """True for a list of counts."""
    return type(value) is list and len(value) <= MAX_OPEN and all(map(is_count, value))


def is_text(value: Any) -> bool:
    """True for text of a bounded length."""
    return type(value) is str and len(value) <= 10000


FIELDS: dict[int, tuple[Callable[[Any], bool], ...]] = {
    HELLO: (lambda value: type(value) is dict and all(type(key) is str for key in value),),
    REQUEST: (is_count, is_count, is_counts, is_count, is_text),
    PING: (is_count, is_count, is_counts),
    CANCEL: (is_count,),
    BYE: (is_text,),
}


# ---- the book of a session --------------------------------------------------------------------------------------------


class Call:
    """One request."""

    def __init__(self, book: Book, seq: int, method: str, deadline: float, frames: list[bytes]):
        self.book, self.seq, self.method, self.deadline = book, seq, method, deadline
        self.frames = frames
        self.cancelled = False
        """True once nobody waits for the answer."""


class Book:
    """What has arrived in a session, what runs, and which answers are kept. PROTOCOL.md, section 5."""

    def __init__(self, name: str, token: bytes, num_credits: int) -> None:
        self.name, self.token, self.route, self.heard_at = name, token, b"", 0.0
        self.slots: dict[int, Any] = {}
        """Environments of this session; touched by the main thread only."""
        self.num_credits = num_credits
        self.running: Call | None = None
        self.lost = ""
        self.dropped = False
        self.calls: dict[int, Call] = {}
        self.waiting: dict[int, Call] = {}
        self.answers: dict[int, tuple[float, list[bytes]]] = {}
        self.missing: set[int] = set()
        self.highest = 0

    def settle(self, upto: int, open_seqs: Sequence[int]) -> None:
        """Forget every request up to `upto` that the client no longer waits for."""
        still = set(open_seqs)
        for seq in [seq for seq in self.calls if seq <= upto and seq not in still]:
            self.forget(seq)
        self.missing = {seq for seq in self.missing if seq > upto or seq in still}

    def forget(self, seq: int) -> None:
        """Drop one request: an answered one with its answer, a waiting one unexecuted."""
        call = self.calls.pop(seq, None)
        self.waiting.pop(seq, None)
        if self.answers.pop(seq, None) is None and call is not None:
            call.cancelled = True

    def is_new(self, seq: int, open_seqs: Sequence[int]) -> bool:
        """True when a request has not arrived before and is still wanted."""
        if len(open_seqs) > self.num_credits:
            raise malformed(f"expected at most {self.num_credits} requests in flight")
        if seq in self.calls or seq not in open_seqs:
            return False
        return seq > self.highest or seq in self.missing

    def add(self, call: Call, open_seqs: Sequence[int]) -> None:
        """Take in a new request; numbers skipped before it are missing if the client still waits for them."""
        if call.seq > self.highest:
            self.missing.update(seq for seq in open_seqs if self.highest < seq < call.seq)
            self.highest = call.seq
        self.missing.discard(call.seq)
        self.calls[call.seq] = self.waiting[call.seq] = call

    def next_call(self) -> Call | None:
        """The call to execute now, which becomes `running`; None while one runs, none waits, or one is missing."""
        if self.running is not None or not self.waiting:
            return None
        seq = min(self.waiting)
        if self.missing and min(self.missing) < seq:
            return None
        self.running = self.waiting.pop(seq)
        return self.running

    def is_open(self, call: Call) -> bool:
        """True while a call still needs an answer."""
        return self.calls.get(call.seq) is call and call.seq not in self.answers


# ---- keys -------------------------------------------------------------------------------------------------------------

DOMAIN = b"longstep"


class Keys:
    """The server's own pair and the public keys of the clients it lets in, all in Z85 text."""

    def __init__(self, public: bytes, secret: bytes, allowed: Sequence[bytes]) -> None:
        self.public, self.secret, self.allowed = public, secret, frozenset(allowed)

    def guard(self, context: Any) -> Any:
        """The socket that libzmq asks about each connection; see `answer`."""
        if not zmq.has("curve"):
            raise Fault("ConfigError", "expected a pyzmq with CURVE, this one was built without")
        asked = context.socket(zmq.REP)
        asked.setsockopt(zmq.LINGER, 0)
        asked.bind("inproc://zeromq.zap.01")
        return asked

    def secure(self, socket: Any) -> None:
        """Require keys on a socket; before it is bound."""
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        try:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        except zmq.ZMQError as error:
            raise Fault("ConfigError", f"expected keys of 40 characters: {error}") from None
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def answer(self, asked: Any) -> None:
        """Let in whoever is on the list, and nobody else (ZAP, rfc.zeromq.org/spec/27)."""
        from zmq.utils import z85

        with contextlib.suppress(zmq.Again):
            while True:
                request = asked.recv_multipart(zmq.NOBLOCK)
                version, number = request[:2] if len(request) > 1 else (b"1.0", b"")
                domain, mechanism = (request[2], request[5]) if len(request) == 7 else (b"", b"")
                is_curve = domain == DOMAIN and mechanism == b"CURVE" and len(request[6]) == 32
                if is_curve and z85.encode(request[6]) in self.allowed:
                    asked.send_multipart([version, number, b"200", b"OK", b"", b""])
                else:
                    asked.send_multipart([version, number, b"400", b"", b"", b""])


def load_keys(own: str, allowed: Sequence[str]) -> Keys:
    """Keys from the files of `longstep keys new`."""
    from zmq import auth

    loaded = []
    for path in (own, *allowed):
        try:
            loaded.append(auth.load_certificate(path))
        except (OSError, ValueError) as error:
            raise Fault("ConfigError", f"expected a key file at {path}: {error}") from None
    public, secret = loaded[0]
    if secret is None:
        raise Fault("ConfigError", f"expected a secret key in {own}, got a public one")
    if os.name == "posix" and os.stat(own).st_mode & 0o077:
        raise Fault("ConfigError", f"expected a secret key only you can read; run: chmod 600 {own}")
    return Keys(public, secret, [key for key, _ in loaded[1:]])


# ---- the server -------------------------------------------------------------------------------------------------------


class Flag:
    """Something that is false until it is set. Unlike an Event, a signal handler may set it: there is no lock."""

    def __init__(self) -> None:
        self.is_on = False

    def is_set(self) -> bool:
        """True once `set` was called."""
        return self.is_on

    def set(self) -> None:
        """Set it, for good."""
        self.is_on = True


class Server:
    """One thread owns the socket and keeps the books; `serve` runs the methods in the thread that calls it."""

    def __init__(
        self,
        service: Environments,
        address: str | None = None,
        num_credits: int = 64,
        heartbeat_s: float = 1.0,
        lost_after_s: float = 10.0,
        max_sessions: int = 256,
        keys: Keys | None = None,
    ) -> None:
        self.service = service
        self.keys = keys
        self.asked: Any = None
        self.num_credits, self.max_sessions = num_credits, max_sessions
        self.heartbeat_s, self.lost_after_s = heartbeat_s, lost_after_s
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopping = Flag()
        self.books: dict[bytes, Book] = {}
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_reader.setblocking(False)
        self.wake_writer.setblocking(False)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        queue_length = 4 * num_credits + 64
        largest = max(LIMITS["max_body_bytes"], LIMITS["max_frame_bytes"])
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, queue_length),
            (zmq.RCVHWM, queue_length),
            (zmq.MAXMSGSIZE, largest),
            (zmq.IPV6, int("[" in (address or ""))),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self.socket.setsockopt(option, value)
        self.folder = ""
        try:
            if keys is not None:
                self.asked = keys.guard(self.context)
                keys.secure(self.socket)
            self.address = self.bind(address)
        except Fault:
            self.free()
            raise

    def bind(self, address: str | None) -> str:
        """Bind, and give the address that clients connect to."""
        if address is None:
            self.folder = tempfile.mkdtemp(prefix=f"longstep-ipc-{os.getpid()}-")
            address = f"ipc://{self.folder}/s"
        elif self.keys is None and not is_local(address):
            raise Fault(
                "ConfigError",
                f"expected CURVE keys for `{address}`, which other machines can reach; give `--keys` and `--allow`, or "
                "an ipc or loopback address",
            )
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise Fault("ConfigError", f"cannot bind `{address}`: {error}") from None
        return bytes(self.socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def serve(self) -> None:
        """Serve until `stop`; environments run in this thread."""
        thread = threading.Thread(target=self.run, name="longstep-io", daemon=True)
        thread.start()
        while not self.stopping.is_set():
            job = self.jobs.get()
            if isinstance(job, Book):
                self.service.close_session(job)
            elif job is not None:
                self.execute(job)
        thread.join(2.0)
        for book in list(self.books.values()):
            self.service.close_session(book)
        self.tidy()
        self.free()

    def free(self) -> None:
        """Free the sockets; what is still to be sent has 200 ms."""
        self.socket.close(linger=200)
        if self.asked is not None:
            self.asked.close(linger=0)
        self.context.term()
        self.wake_reader.close()
        self.wake_writer.close()

    def stop(self) -> None:
        """Make `serve` end; may be called from a signal handler."""
        self.stopping.set()
        self.jobs.put(None)
        self.wake()

    def tidy(self) -> None:
        """Remove the socket file."""
        if self.address.startswith("ipc://"):
            with contextlib.suppress(OSError):
                os.unlink(self.address[len("ipc://") :])
        if self.folder:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)

    def wake(self) -> None:
        """Make the other thread look at outcomes."""
        with contextlib.suppress(OSError):  # full: it will look; closed: it has ended
            self.wake_writer.send(b"w")

    def execute(self, call: Call) -> None:
        """Run one method; what it gives or raises is the answer."""
        outcome: Any = None
        try:
            if not call.cancelled:
                outcome = self.service.methods[call.method](call.book, decode(call.frames))
        except Exception as error:  # whatever a method raises is its client's to know
            outcome = fields_of(error)
        self.outcomes.put((call, outcome))
        self.wake()

    # The other thread. Frames of an answer are bytes, the fields of an error are text.

    def run(self) -> None:
        """Own the socket until `stop`."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.wake_reader, zmq.POLLIN)
        if self.asked is not None:
            poller.register(self.asked, zmq.POLLIN)
        try:
            while not self.stopping.is_set():
                poller.poll(self.patience_ms())
                if self.keys is not None:
                    self.keys.answer(self.asked)
                with contextlib.suppress(OSError):
                    self.wake_reader.recv(4096)
                self.take_outcomes()
                for _ in range(100):  # then look at deadlines again
                    if not self.take_message():
                        break
                self.keep_time(time.monotonic())
            for book in self.books.values():
                self.send(book.route, [pack_head(BYE, book.token, "the server stops")])
        finally:
            self.socket.close(linger=200)
            self.stop()

    def patience_ms(self) -> int:
        """How long nothing has to be done unless something arrives."""
        soonest = min(
            (call.deadline for book in self.books.values() for call in book.calls.values()
             if call.seq not in book.answers),
            default=math.inf,
        )  # fmt: skip
        return int(1000 * max(0.0, min(0.1, soonest - time.monotonic()))) + 1

    def take_outcomes(self) -> None:
        """Answer what has been executed."""
        while not self.outcomes.empty():
            call, outcome = self.outcomes.get()
            book = call.book
            book.running = None
            if book.dropped:
                self.jobs.put(book)
                continue
            if outcome is not None and book.is_open(call):
                self.answer(book, call, outcome)
            self.advance(book)

    def take_message(self) -> bool:
        """Read one message, if there is one; what breaks the protocol has no effect."""
        try:
            route, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            if not frames or len(frames) > LIMITS["max_frames"] + 2:
                raise malformed("expected fewer frames")
            if sum(map(len, frames)) > LIMITS["max_message_bytes"]:
                raise malformed("expected a shorter message")
            kind, token, fields = read_head(frames[0])
            self.take(route, kind, token, fields, frames[1:])
        except Fault as fault:
            token = getattr(fault, "token", None)
            if token is not None:
                self.send(route, [pack_head(REFUSED, token, *fields_of(fault)[:2])])
        return True

    def take(
        self, route: bytes, kind: int, token: bytes, fields: list[Any], frames: list[bytes]
    ) -> None:
        """Do what a message asks for."""
        book = self.books.get(token)
        if kind == HELLO:
            self.hello(route, token, fields[0], book)
            return
        if book is None:
            if kind != BYE:
                said = "the server does not know this session: it restarted, or gave the client up"
                self.send(route, [pack_head(LOST, token, said)])
            return
        book.route, book.heard_at = route, time.monotonic()
        if kind == REQUEST:
            self.request(book, fields, frames)
        elif kind == PING:
            self.ping(book, *fields)
        elif kind == CANCEL:
            book.forget(fields[0])
        else:
            self.drop(book)
            return
        self.advance(book)

    def hello(self, route: bytes, token: bytes, asked: dict[str, Any], book: Book | None) -> None:
        """Open a session, or repeat that it is open."""
        if book is None:
            try:
                book = self.open_book(token, asked)
            except Fault as fault:
                self.send(route, [pack_head(REFUSED, token, *fields_of(fault)[:2])])
                return
            self.books[token] = book
        book.route, book.heard_at = route, time.monotonic()
        welcome = {
            "service": self.service.name,
            "service_version": self.service.version,
            "methods": sorted(self.service.methods),
            "pid": os.getpid(),
            "num_credits": self.num_credits,
            "heartbeat_ms": int(self.heartbeat_s * 1000),
            "lost_after_ms": int(self.lost_after_s * 1000),
            "limits": LIMITS,
        }
        self.send(route, [pack_head(WELCOME, token, welcome)])

    def open_book(self, token: bytes, asked: dict[str, Any]) -> Book:
        """A new session, or why there is none."""
        name = asked.get("name")
        if type(name) is not str or not 0 < len(name) <= 200:
            raise malformed("expected a name of 1 to 200 characters in HELLO")
        wanted = (asked.get("service"), asked.get("service_version"))
        if wanted != (self.service.name, self.service.version):
            raise Fault(
                "ConfigError",
                f"expected a client of `{self.service.name}` version {self.service.version}, got one of "
                f"{wanted[0]!r:.80} version {wanted[1]!r:.40}; check the address",
            )
        if any(book.name == name for book in self.books.values()):
            raise Fault("ConfigError", f"expected a client name that is not in use, got `{name}`")
        if len(self.books) >= self.max_sessions:
            raise Fault("ConfigError", f"expected at most {self.max_sessions} clients")
        return Book(name, token, self.num_credits)

    def request(self, book: Book, fields: list[Any], frames: list[bytes]) -> None:
        """Take in a request, or answer it again."""
        seq, upto, open_seqs, remaining_ms, method = fields
        book.settle(upto, open_seqs)
        if seq in book.answers:
            self.send_answer(book, seq)
        elif book.is_new(seq, open_seqs):
            call = Call(book, seq, method, time.monotonic() + remaining_ms / 1000, frames)
            book.add(call, open_seqs)
            if method not in self.service.methods:
                known = ", ".join(sorted(self.service.methods))
                said = f"expected one of the methods {known}, got `{method:.200}`"
                self.answer(book, call, ["RegistryError", said, ""])
            elif book.lost:
                self.answer(book, call, ["SessionLostError", book.lost, ""])

    def ping(self, book: Book, number: int, upto: int, open_seqs: list[int]) -> None:
        """Send kept answers that may have been lost, and say what is here."""
        book.settle(upto, open_seqs)
        long_ago = time.monotonic() - self.heartbeat_s / 2
        for seq in [seq for seq, (sent_at, _) in book.answers.items() if sent_at < long_ago]:
            self.send_answer(book, seq)
        self.send(book.route, [pack_head(PONG, book.token, number, sorted(book.calls))])

    def advance(self, book: Book) -> None:
        """Have the next call executed, if it may."""
        call = book.next_call()
        if call is not None:
            self.jobs.put(call)

    def answer(self, book: Book, call: Call, outcome: list[Any]) -> None:
        """Keep an answer until it is acknowledged, and send it."""
        if isinstance(outcome[0], str):
            frames = [pack_head(ERROR, book.token, call.seq, *outcome)]
        else:
            frames = [pack_head(REPLY, book.token, call.seq), *outcome]
        book.waiting.pop(call.seq, None)
        book.answers[call.seq] = (0.0, frames)
        self.send_answer(book, call.seq)

    def send_answer(self, book: Book, seq: int) -> None:
        """Send a kept answer."""
        frames = book.answers[seq][1]
        book.answers[seq] = (time.monotonic(), frames)
        self.send(book.route, frames)

    def send(self, route: bytes, frames: list[bytes]) -> None:
        """Send, unless the peer's queue is full or it is gone; what matters is kept and asked for again."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([route, *frames], zmq.NOBLOCK)

    def keep_time(self, now: float) -> None:
        """Report deadlines that passed, and drop clients that fell silent."""
        for book in list(self.books.values()):
            if now - book.heard_at > self.lost_after_s:
                self.drop(book)
                continue
            late = [call for call in book.calls.values() if call.deadline <= now]
            for call in late:
                if book.is_open(call):
                    self.expire(book, call)
            if late:
                self.advance(book)

    def expire(self, book: Book, call: Call) -> None:
        """Report a call whose deadline passed; after one that runs, nothing more is executed in its session."""
        call.cancelled = True
        if book.running is not call:
            said = f"`{call.method}` was not executed: its deadline passed while it waited its turn"
            self.answer(book, call, ["DeadlineError", said, ""])
            return
        said = f"`{call.method}` still ran at its deadline; the session's state is unknown now"
        self.answer(book, call, ["DeadlineError", said, ""])
        book.lost = f"an earlier call of {said}; open a new session"
        for waiting in list(book.waiting.values()):
            self.answer(book, waiting, ["SessionLostError", book.lost, ""])

    def drop(self, book: Book) -> None:
        """The client is gone: withdraw its calls, close its environments once none runs."""
        del self.books[book.token]
        book.dropped = True
        for seq in list(book.calls):
            book.forget(seq)
        if book.running is None:
            self.jobs.put(book)
        else:
            book.running.cancelled = True


def is_local(address: str) -> bool:
    """True for ipc and loopback addresses."""
    if address.startswith("ipc://"):
        return True
    return re.match(r"tcp://(127(\.\d+){3}|localhost|\[::1\]):", address) is not None


# ---- the environments -------------------------------------------------------------------------------------------------

OPERATIONS = ("reset", "step", "replay", "copy")
MAX_SLOTS = 1024
CLOSE_S = 10.0


class Environments:
    """The service `longstep.env`: slots with one environment each. PROTOCOL.md, section 9."""

    name, version = "longstep.env", 1

    def __init__(
        self,
        specs: dict[str, dict[str, Any]],
        step_timeout_s: float = 60.0,
        reset_timeout_s: float = 120.0,
        board: Board | None = None,
        suspects: Sequence[Sequence[Any]] = (),
    ) -> None:
        self.specs, self.board, self.suspects = specs, board, suspects
        self.timeouts = {"step_timeout_s": step_timeout_s, "reset_timeout_s": reset_timeout_s}
        self.methods = {"open": self.open, "run": self.run}

    def open(self, book: Book, value: Any) -> list[bytes]:
        """Make the session's slots, and the first environment, so that what is wrong with it is said at once."""
        name, num_slots, owner = read_order(value)
        if book.slots:
            raise Fault("ConfigError", "expected one `open` in a session, got a second one")
        if name is None and len(self.specs) == 1:
            name = next(iter(self.specs))
        if name not in self.specs:
            known = ", ".join(sorted(self.specs))
            said = (
                f"expected an environment that this server has, got `{name!s:.200}`; known: {known}"
            )
            raise Fault("RegistryError", said)
        book.slots = {
            number: Slot(
                maker(self.specs[name]),
                lambda limit, number=number: self.begin(owner, number, limit),
            )
            for number in range(num_slots)
        }
        env = self.watched(lambda: book.slots[0].build(self.timeouts["reset_timeout_s"]))
        traits = {
            "environment": name,
            "env_id": self.specs[name].get("env_id"),
            "kind": "raw",
            "blocking": False,
            "has_board": self.board is not None,
            "can_copy": can_copy(env),
            "action_space": describe_space(getattr(env, "action_space", None)),
            "action_names": action_names(env),
            "max_steps": max_steps(env),
            "suspects": [[slot, why] for whose, slot, why in self.suspects if whose == owner],
            **self.timeouts,
        }
        return encode(traits)

    def run(self, book: Book, value: Any) -> list[bytes]:
        """Execute commands; columns of what they gave."""
        commands = read_commands(value, len(book.slots))
        rows = self.watched(lambda: [self.execute(book, *command) for command in commands])
        try:
            return encode([list(column) for column in zip(*rows)])
        except Fault:
            return encode([list(column) for column in zip(*map(sendable, rows))])

    def execute(self, book: Book, number: int, operation: str, argument: Any) -> list[Any]:
        """One row: observation, reward, terminated, truncated, info, error, seconds."""
        start, slot = time.perf_counter(), book.slots[number]
        try:
            row = slot.execute(operation, argument, book.slots, self.timeouts)
        except Exception as error:  # whatever an environment raises is its slot's error
            slot.discard()
            row = failed_row(error)
        return [*row, time.perf_counter() - start]

    def close_session(self, book: Book) -> None:
        """Close a session's environments."""
        for slot in book.slots.values():
            self.watched(slot.discard)

    def begin(self, owner: int, slot: int, limit_s: float) -> None:
        """Tell whoever started this process what runs from now on."""
        if self.board is not None:
            self.board.begin(owner, slot, time.monotonic() + limit_s)

    def watched(self, work: Callable[[], Any]) -> Any:
        """What `work` gives; then nothing runs."""
        try:
            return work()
        finally:
            if self.board is not None:
                self.board.end()


def failed_row(error: Exception) -> list[Any]:
    """A row of a command that failed, without its time."""
    kind = error.kind if isinstance(error, Fault) else type(error).__name__
    return [None, 0.0, False, False, {}, valid_text(f"{kind}: {error}")[:8000]]


def sendable(row: list[Any]) -> list[Any]:
    """The row, or one that says why it cannot travel."""
    try:
        encode(row)
    except Fault as fault:
        return [*failed_row(fault), row[-1]]
    return row


class Slot:
    """One place for an environment, which is made when first reset, and anew after it failed."""

    def __init__(self, make: Callable[[], Any], begin: Callable[[float], None]) -> None:
        self.make, self.begin = make, begin
        self.env: Any = None
        self.last: list[Any] = []

    def build(self, limit_s: float) -> Any:
        """The environment, made if it is not there."""
        if self.env is None:
            self.begin(limit_s)
            self.env = self.make()
        return self.env

    def discard(self) -> None:
        """Close the environment; a broken one may fail at that too, and there is nobody left to tell."""
        env, self.env, self.last = self.env, None, []
        close = getattr(env, "close", None)
        if close is not None:
            self.begin(CLOSE_S)
            with contextlib.suppress(Exception):
                close()

    def execute(
        self, operation: str, argument: Any, slots: dict[int, Slot], limits: dict[str, float]
    ) -> list[Any]:
        """A row without its time."""
        step_s, reset_s = limits["step_timeout_s"], limits["reset_timeout_s"]
        if operation == "reset":
            return self.reset(argument, reset_s)
        if operation == "step":
            return self.step(argument, step_s)
        if operation == "copy":
            return self.copy(slots[argument], reset_s)
        if type(argument) is not list or len(argument) != 2 or type(argument[1]) is not list:
            raise Fault("DataError", "expected [start, actions] as argument of `replay`")
        start, actions = argument
        told = [] if start is None else [self.reset(start, reset_s)[0]]
        told += [self.step(action, step_s)[0] for action in actions]
        return [told, 0.0, False, False, {}, None]

    def reset(self, argument: Any, limit_s: float) -> list[Any]:
        """Begin an episode, in any of the ways that environments have of taking a seed."""
        if type(argument) is not list or len(argument) != 2:
            raise Fault("DataError", "expected [seed, options] as argument of `reset`")
        env = self.build(limit_s)
        self.begin(limit_s)
        result = env.reset(**reset_arguments(env, *argument))
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            observation, info = result
        else:
            observation, info = result, {}
        self.last = [observation, 0.0, False, False, dict(info), None]
        return self.last

    def step(self, action: Any, limit_s: float) -> list[Any]:
        """Act; the four values of the old Gym are read as Gymnasium's five."""
        if self.env is None:
            raise Fault("EnvError", "the environment of this slot was lost; reset it")
        self.begin(limit_s)
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise Fault("EnvError", "expected five values, or four of the old Gym, from `step`")
        observation, reward, info = result[0], float(result[1]), dict(result[-1])
        if len(result) == 5:
            terminated, truncated = bool(result[2]), bool(result[3])
        else:
            truncated = bool(result[2]) and bool(info.get("TimeLimit.truncated", False))
            terminated = bool(result[2]) and not truncated
        self.last = [observation, reward, terminated, truncated, info, None]
        return self.last

    def copy(self, source: Slot, limit_s: float) -> list[Any]:
        """Stand where `source` stands, by its snapshot."""
        if source.env is None or not source.last or not can_copy(source.env):
            raise Fault("EnvError", "expected an environment with a snapshot in the slot to copy")
        ours = self.build(limit_s)
        self.begin(limit_s)
        ours.restore(source.env.snapshot())
        self.last = list(source.last)
        return self.last


def can_copy(env: Any) -> bool:
    """Whether one environment can stand where another stands by `snapshot` and `restore`, with no wrapper between."""
    is_bare = env is getattr(env, "unwrapped", env)
    return bool(is_bare and hasattr(env, "snapshot") and hasattr(env, "restore"))


def reset_arguments(env: Any, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of `reset` that this environment takes; an old one is seeded by `env.seed`."""
    if type(seed) not in (int, type(None)) or type(options) not in (dict, type(None)):
        raise Fault("DataError", "expected an integer and a map, or nil, as seed and options")
    try:
        parameters = inspect.signature(env.reset).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return {"seed": seed, "options": options}
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        # Gym's old wrappers pass on whatever they get
        inner = getattr(env, "unwrapped", env)
        if inner is not env:
            return reset_arguments_of_wrapped(env, inner, seed, options)
        names |= {"seed", "options"}
    arguments: dict[str, Any] = {}
    if "seed" in names:
        arguments["seed"] = seed
    elif seed is not None:
        if not hasattr(env, "seed"):
            said = f"expected `reset` to take a seed, or a method `seed`, from {type(env).__name__}"
            raise Fault("EnvError", said)
        env.seed(seed)
    if "options" in names:
        arguments["options"] = options
    elif options:
        raise Fault("EnvError", "expected `reset` to take options, got an environment without")
    return arguments


def reset_arguments_of_wrapped(
    env: Any, inner: Any, seed: int | None, options: dict[str, Any] | None
) -> dict[str, Any]:
    """Arguments for a wrapper: those that the environment inside takes; `seed` is called on the wrapper."""

    class Shown:
        reset = staticmethod(inner.reset)

    shown: Any = Shown()
    if hasattr(env, "seed"):
        shown.seed = env.seed
    return reset_arguments(shown, seed, options)


def read_order(value: Any) -> tuple[Any, int, int]:
    """Name, number of slots and owner of an `open`."""
    with contextlib.suppress(KeyError, TypeError):
        name, num_slots, owner = value["environment"], value["num_slots"], value["owner"]
        if type(num_slots) is int and 1 <= num_slots <= MAX_SLOTS and 0 <= owner < 1 << 63:
            return name, num_slots, owner
    raise Fault("DataError", "expected `environment`, `num_slots` and `owner` at `open`")


def read_commands(value: Any, num_slots: int) -> list[tuple[int, str, Any]]:
    """The commands of a `run`."""
    if num_slots == 0:
        raise Fault("ConfigError", "expected `open` before `run` in a session")
    if type(value) is not list or len(value) != 3 or set(map(type, value)) != {list}:
        raise Fault("DataError", "expected [slots, operations, arguments] at `run`")
    slots, operations, arguments = value
    if not len(slots) == len(operations) == len(arguments) > 0:
        raise Fault("DataError", "expected three columns of one length at `run`")
    for slot, operation, argument in zip(slots, operations, arguments):
        places = [slot, argument] if operation == "copy" else [slot]
        if any(type(place) is not int or not 0 <= place < num_slots for place in places):
            raise Fault("DataError", f"expected slots from 0 to {num_slots - 1} at `run`")
        if operation not in OPERATIONS:
            raise Fault("DataError", f"expected operations among {OPERATIONS} at `run`")
    return list(zip(slots, operations, arguments))


def describe_space(space: Any) -> Any:
    """A space of actions as plain values; None for texts and for what is unknown, whose actions are sent as they are."""
    kind = type(space).__name__
    if kind == "Discrete":
        return ["discrete", int(space.n), int(getattr(space, "start", 0))]
    if kind == "MultiDiscrete":
        return ["multi_discrete", [int(size) for size in space.nvec]]
    if kind == "MultiBinary":
        return ["multi_binary", int(space.n)]
    if kind == "Box":
        return ["box", space.low, space.high, space.dtype.str]
    if kind == "Tuple":
        return ["tuple", [describe_space(part) for part in space.spaces]]
    if kind == "Dict":
        return ["dict", {str(key): describe_space(part) for key, part in space.spaces.items()}]
    return None


def action_names(env: Any) -> list[str] | None:
    """Names of the actions of a discrete space, where the environment has them."""
    names = getattr(env, "action_names", None)
    if names is None:
        return None
    if isinstance(names, dict):
        names = [names[action] for action in sorted(names)]
    return [str(name) for name in names]


def max_steps(env: Any) -> int | None:
    """The environment's own limit, where it tells one."""
    limits = [
        getattr(getattr(env, "spec", None), "max_episode_steps", None),
        getattr(env, "max_steps", None),
    ]
    known = [limit for limit in limits if type(limit) is int and limit > 0]
    return min(known) if known else None


def maker(spec: dict[str, Any]) -> Callable[[], Any]:
    """What makes an environment of an EnvSpec, as plain values."""

    def make() -> Any:
        for module in spec.get("imports") or ():
            importlib.import_module(module)
        kwargs = dict(spec.get("kwargs") or {})
        if spec.get("entry_point") is None:
            return gym().make(spec["env_id"], **kwargs)
        return entry_point(spec["entry_point"])(**kwargs)

    return make


def gym() -> Any:
    """Gymnasium, or the old Gym."""
    for name in ("gymnasium", "gym"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise Fault(
        "ConfigError",
        "expected gymnasium or gym for an environment by id; add one to `requirements`",
    )


def entry_point(text: str) -> Callable[..., Any]:
    """What `module:attribute` names."""
    module, _, attribute = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ValueError, ModuleNotFoundError, AttributeError) as error:
        said = f"expected `module:attribute` that can be imported, got `{text}`: {error}"
        raise Fault("ConfigError", said) from error
    return found


# ---- the command line -------------------------------------------------------------------------------------------------


class Board:
    """What is executed now, written to memory that the parent sees: deadline, owner and slot, in its first line."""

    def __init__(self, fd: int) -> None:
        import mmap

        self.memory = mmap.mmap(fd, 0)
        os.close(fd)
        size = len(self.memory) // 24 * 8
        view = memoryview(self.memory)
        self.deadlines = view[:size].cast("d")
        self.owners = view[size : 2 * size].cast("q")
        self.slots = view[2 * size : 3 * size].cast("q")

    def begin(self, owner: int, slot: int, deadline: float) -> None:
        """Say what runs from now on."""
        self.owners[0], self.slots[0] = owner, slot
        self.deadlines[0] = deadline

    def end(self) -> None:
        """Say that nothing runs."""
        self.deadlines[0] = 0.0


def follow_parent(parent_pid: int, server: Server) -> None:
    """End this process once the parent is dead: orderly, or by force 3 s later."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.25)
        server.stop()
        time.sleep(3.0)
        server.tidy()
        os._exit(1)

    threading.Thread(target=watch, name="longstep-follow-parent", daemon=True).start()


def serve(server: Server, parent_pid: int | None) -> None:
    """Serve until a signal or the parent's death."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if parent_pid is not None:
        follow_parent(parent_pid, server)
    server.serve()


def import_from_here() -> None:
    """Import from the current folder, and not from this file's, whose neighbours are no modules of ours."""
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    sys.path.insert(0, os.getcwd())


def work() -> None:
    """Serve what the standard input describes, as `longstep_bindings.envs.worker` does; see there."""
    import_from_here()
    orders = decode([sys.stdin.buffer.read()])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    told: dict[str, Any] = {}
    server = None
    try:
        limits = {name: orders[name] for name in ("step_timeout_s", "reset_timeout_s")}
        board = Board(orders["board_fd"])
        environments = Environments(
            orders["specs"], board=board, suspects=orders["suspects"], **limits
        )
        keys = None if orders["keys"] is None else Keys(*orders["keys"])
        server = Server(environments, orders["address"], keys=keys, **orders["terms"])
        told["address"] = server.address
    except Exception as error:
        told["kind"], told["message"], _ = fields_of(error)
    with os.fdopen(orders["ready_fd"], "wb") as pipe:
        pipe.write(pack(told))
    if server is None:
        sys.exit(1)
    serve(server, orders["parent_pid"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one environment, and print its address."""
    parser = argparse.ArgumentParser(description="Serve an environment to longstep.")
    parser.add_argument("environment", help="module:attribute of what makes it")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="its arguments, in JSON")
    parser.add_argument(
        "--address", help="ipc://path or tcp://127.0.0.1:*; a private ipc one if not given"
    )
    parser.add_argument("--keys", help="the server's own name.key_secret")
    parser.add_argument(
        "--allow", nargs="+", default=[], help="name.key of each client that is let in"
    )
    parser.add_argument(
        "--parent-pid", type=int, help="process to follow: serving ends when it dies"
    )
    parser.add_argument("--step-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--reset-timeout", type=float, default=120.0, help="seconds")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds")
    parser.add_argument("--lost-after", type=float, default=10.0, help="seconds of silence")
    chosen = parser.parse_args(arguments)
    import_from_here()
    spec = {"entry_point": chosen.environment, "kwargs": chosen.kwargs}
    service = Environments({chosen.environment: spec}, chosen.step_timeout, chosen.reset_timeout)
    if (chosen.keys is None) != (not chosen.allow):
        parser.error("expected both --keys and --allow, or neither")
    try:
        server = Server(
            service,
            chosen.address,
            heartbeat_s=chosen.heartbeat,
            lost_after_s=chosen.lost_after,
            keys=load_keys(chosen.keys, chosen.allow) if chosen.keys else None,
        )
    except Fault as fault:
        parser.error(str(fault))
    print(server.address, flush=True)
    serve(server, chosen.parent_pid)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main()
