"""One value as the frames of a message, and back: msgpack for structure, raw frames for arrays, limits for both.

`encode(value)` gives `[body, raw frame, ...]`, `decode(frames)` the equal value: None, bool, int of 64 bits, float, str,
bytes, list, tuple, set, frozenset, dict, numpy scalars and arrays of numbers, in any nesting; keys of dicts and members
of sets are scalars. Types come back as they went, except: subclasses (an IntEnum, an OrderedDict) as the built-in type
they refine, bytearray and memoryview as bytes, arrays read-only.

What cannot travel is an error on the sender that names the place, such as `$.infos[3].score`. What a peer sends wrongly
is a `ProtocolError`, whatever it is. Nothing is evaluated, and there is no pickle.

The bytes are specified in PROTOCOL.md. This module and its neighbours `scan` and `arrays` are the only ones to touch
the untyped msgpack package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from longstep.errors import ProtocolError, UnsupportedTypeError
from longstep_bindings.arrays import ArrayReader, pack_array
from longstep_bindings.limits import DEFAULT_LIMITS, Limits
from longstep_bindings.scan import check_body
from longstep_bindings.structure import as_plain, complaint, is_scalar

__all__ = ["check_frame_sizes", "decode", "encode", "encode_flat"]

_MARK = 3
"""Ext code of the first element of an array that is not a list; its payload says what it is."""
_MARKS: dict[type, Any] = {
    tuple: msgpack.ExtType(_MARK, b"t"),
    set: msgpack.ExtType(_MARK, b"s"),
    frozenset: msgpack.ExtType(_MARK, b"f"),
}


_NO_ARRAYS = ArrayReader(())


def encode(value: Any, limits: Limits = DEFAULT_LIMITS) -> list[bytes]:
    """The frames of `value`: the body, then one frame per large array.

    Raises:
        UnsupportedTypeError: A value cannot travel: its type, its size or NaN; the message names where it stands.
    """
    special = _Special()
    body = b""
    try:
        body = msgpack.Packer(strict_types=True, default=special).pack(value)
        wrong = special.may_be_key
        if not _is_table(value, limits):
            check_body(body, max_depth=limits.max_depth, max_items=limits.max_items)
            wrong |= _may_hold_nan(body)
        said = _complain(value, limits) if wrong else None
    except Exception as error:  # several unrelated classes, none of which names the place
        said = _complain(value, limits) or f"expected a value that can travel, got {error!r:.200}"
    if said is not None:
        raise UnsupportedTypeError(said)
    encoded = [body, *special.frames]
    try:
        check_frame_sizes(encoded, limits)
    except ProtocolError as error:
        raise UnsupportedTypeError(f"{error}; send less at once, or raise the limits") from None
    return encoded


def encode_flat(value: list[Any], limits: Limits) -> list[bytes]:
    """The same as `encode` for a list whose members the caller has looked at: leaves and lists of leaves, none of them NaN."""
    special = _Special()
    try:
        body: bytes = msgpack.Packer(strict_types=True, default=special).pack(value)
    except Exception:
        return encode(value, limits)  # which says what it is and where
    if special.frames or len(body) > min(limits.max_body_bytes, limits.max_message_bytes):
        return encode(value, limits)
    return [body]


def decode(frames: Sequence[bytes | memoryview], limits: Limits = DEFAULT_LIMITS) -> Any:
    """The value of a message's body and raw frames.

    Raises:
        ProtocolError: The frames are not what `encode` makes, or exceed the limits. No other error is raised.
    """
    if not frames:
        raise ProtocolError("expected a body frame, got none")
    body, has_arrays = frames[0], len(frames) > 1
    if has_arrays or len(body) > min(limits.max_body_bytes, limits.max_message_bytes):
        check_frame_sizes(frames, limits)
    check_body(body, max_depth=limits.max_depth, max_items=limits.max_items)
    reader = ArrayReader(frames[1:]) if has_arrays else _NO_ARRAYS
    try:
        value = _unpack(body, reader, marked=False)
    except _MarkedError:
        reader = ArrayReader(frames[1:])
        value = _unpack(body, reader, marked=True)
        if type(value) is _Mark:
            raise ProtocolError("expected a value, got a bare mark") from None
    if has_arrays:
        reader.finish()
    return value


def _unpack(body: bytes | memoryview, reader: ArrayReader, *, marked: bool) -> Any:
    """The value of a checked body.

    Args:
        body: The first frame.
        reader: Of its arrays.
        marked: True to read marks, which costs a call for each list and map. False raises `_MarkedError` at one.
    """

    def read_ext(code: int, payload: bytes) -> Any:
        if code != _MARK:
            return reader.read(code, payload)
        if not marked:
            raise _MarkedError
        return _Mark(payload)

    try:
        return msgpack.unpackb(
            body,
            ext_hook=read_ext,
            list_hook=_unmark if marked else None,
            object_hook=_check_map if marked else None,
            strict_map_key=False,
            timestamp=1,
        )
    except (ProtocolError, _MarkedError):
        raise
    except Exception as error:  # msgpack and numpy raise several unrelated classes
        raise ProtocolError(f"expected a valid body, got {type(error).__name__}") from None


def check_frame_sizes(frames: Sequence[bytes | memoryview], limits: Limits) -> None:
    """Raise `ProtocolError` when the body or a raw frame, or their number, exceeds the limits."""
    num_raw, sizes = len(frames) - 1, [len(frame) for frame in frames]
    if num_raw > limits.max_frames:
        raise ProtocolError(f"expected at most {limits.max_frames} raw frames, got {num_raw}")
    if sizes[0] > limits.max_body_bytes:
        raise ProtocolError(
            f"expected a body of at most {limits.max_body_bytes} bytes, got {sizes[0]}"
        )
    if num_raw and max(sizes[1:]) > limits.max_frame_bytes:
        raise ProtocolError(
            f"expected raw frames of at most {limits.max_frame_bytes} bytes, got {max(sizes[1:])}"
        )
    if sum(sizes) > limits.max_message_bytes:
        raise ProtocolError(
            f"expected a message of at most {limits.max_message_bytes} bytes, got {sum(sizes)}"
        )


_LEAVES = frozenset((str, int, float, bool, bytes, type(None), np.ndarray))


def _is_table(value: Any, limits: Limits) -> bool:
    """True for a list of columns of leaves, no more than may be and none of them NaN: its packed bytes need no walk.

    So are batches of steps. Looking at the types of their texts costs a fraction of looking at every byte.
    """
    if type(value) is not list or limits.max_depth < 3:
        return False
    num_items = 1
    for column in value:
        cells: list[Any] = column if type(column) is list else [column]
        num_items += 1 + len(cells)
        kinds = set(map(type, cells))
        if not _LEAVES.issuperset(kinds):
            return False
        if float in kinds and (len(kinds) > 1 or math.isnan(sum(cells))):
            return False
    return num_items <= limits.max_items


class _Special:
    """What msgpack is to pack instead of a value that it does not know; collects the raw frames of one message."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.may_be_key = False
        """True once a value was met that is no scalar but hashes, so it may stand where only scalars may."""

    def __call__(self, item: Any) -> Any:
        plain = as_plain(item)
        kind = type(plain)
        if kind in _MARKS:
            self.may_be_key = True
            # equal sets give equal bytes, whatever order their members hash in
            members = plain if kind is tuple else sorted(plain, key=_sort_key)
            return [_MARKS[kind], *members]
        if isinstance(plain, np.ndarray | np.generic):
            if isinstance(plain, np.inexact):
                self.may_be_key |= plain.dtype.kind == "c"
                if plain != plain:
                    raise UnsupportedTypeError("expected a number, got NaN")
            return pack_array(plain, self.frames)
        if kind is type(item):
            raise UnsupportedTypeError(f"expected a type that can travel, got {kind.__name__}")
        return plain


def _sort_key(member: Any) -> tuple[str, Any]:
    return type(member).__name__, member


def _may_hold_nan(body: bytes) -> bool:
    """False when no float of `body` is NaN; True when one may be, or is infinite or close to it.

    Such a float begins with cb 7f or cb ff. Bytes search for one byte is 20 times as fast as for two.
    """
    if b"\xcb" not in body:
        return False
    data = np.frombuffer(body, np.uint8)
    first_bytes = data[np.flatnonzero(data[:-1] == 0xCB) + 1]
    return bool(((first_bytes | 0x80) == 0xFF).any())


def _complain(value: Any, limits: Limits) -> str | None:
    def pack_leaf(leaf: Any) -> None:
        msgpack.packb(leaf, strict_types=True, default=_Special())

    return complaint(value, limits, pack_leaf)


class _MarkedError(Exception):
    """A body holds more than lists, maps and leaves."""


class _Mark:
    """Stands at the head of a decoded list that was something else; never leaves this module."""

    __slots__ = ("kind",)
    __hash__ = None  # type: ignore[assignment]  # so that it cannot be a key

    def __init__(self, kind: bytes) -> None:
        self.kind = kind


def _check_map(items: dict[Any, Any]) -> dict[Any, Any]:
    if not all(map(is_scalar, items)):
        raise ProtocolError("expected the keys of a map to be scalars")
    if _Mark in set(map(type, items.values())):
        raise ProtocolError("expected a mark only as the first element of an array")
    return items


def _unmark(items: list[Any]) -> Any:
    """The tuple or set that a marked list stands for; other lists as they are."""
    kind = items.pop(0).kind if items and type(items[0]) is _Mark else b""
    if _Mark in set(map(type, items)):
        raise ProtocolError("expected a mark only as the first element of an array")
    if kind == b"":
        return items
    if kind == b"t":
        return tuple(items)
    if kind not in (b"s", b"f"):
        raise ProtocolError(f"expected mark t, s or f, got {kind[:16]!r}")
    if not all(map(is_scalar, items)):
        raise ProtocolError("expected the members of a set to be scalars")
    members = set(items) if kind == b"s" else frozenset(items)
    if len(members) != len(items):
        raise ProtocolError("expected the members of a set to differ")
    return members
