"""Checks of a msgpack body before it is decoded: complete, one value, not too deep, not too many values.

A msgpack header may claim four billion members in five bytes, and a decoder that believes it allocates for them. Here a
body is first walked without building anything. Two walks give the same verdict:

- `_skip`, the C parser of the msgpack package told to skip a value. Its stack has a fixed depth (measured at import), so
  prefixing the body with one-element arrays leaves exactly the allowed depth. About 3 us and a copy of the body.
- `_walk`, in Python, which also counts the values. Needed only for a body with more bytes than it may hold values, or
  when msgpack runs without its C parser.

After a complete walk every claimed member is known to exist, so decoding allocates in proportion to the body.
"""

from __future__ import annotations

import threading
from typing import Any

import msgpack

from longstep.errors import ProtocolError

__all__ = ["check_body"]

_CEILING = 4096
_KEPT_BYTES = 1 << 20
"""Bodies up to this size are walked in a buffer that each thread keeps: a new one costs as much as the walk."""
_kept = threading.local()


def check_body(body: bytes | memoryview, *, max_depth: int, max_items: int) -> None:
    """Raise `ProtocolError` unless `body` is exactly one msgpack value within the limits."""
    if len(body) > max_items or _STACK_DEPTH - max_depth not in range(1, _CEILING):
        _walk(memoryview(body), max_depth, max_items)
    else:
        _skip(body, max_depth)


def _skip(body: bytes | memoryview, max_depth: int) -> None:
    # a body of few bytes cannot hold more containers than it has bytes
    prefix = b"\x91" * (_STACK_DEPTH - max_depth) if len(body) > max_depth else b""
    size = len(prefix) + len(body)
    unpacker: Any = getattr(_kept, "unpacker", None) if size < _KEPT_BYTES else None
    if unpacker is None:
        most = max(size + 1, _KEPT_BYTES)
        unpacker = msgpack.Unpacker(read_size=min(size + 1, 4096), max_buffer_size=most)
    _kept.unpacker = None
    start = unpacker.tell()
    unpacker.feed(prefix)
    unpacker.feed(body)
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        raise ProtocolError("expected a whole msgpack value, got a truncated one") from None
    except msgpack.StackError:
        raise ProtocolError(f"expected at most {max_depth} nested containers, got more") from None
    except Exception as error:  # the parser's own errors, of several unrelated classes
        raise ProtocolError(f"expected msgpack, got {type(error).__name__}") from None
    excess = start + size - unpacker.tell()
    if excess:
        raise ProtocolError(f"expected one msgpack value, got {excess} bytes after it")
    if size < _KEPT_BYTES:
        _kept.unpacker = unpacker


def _walk(body: memoryview, max_depth: int, max_items: int) -> None:
    """The same checks, and the number of values, one value at a time."""
    position, num_items, size = 0, 0, len(body)
    remaining = [
        1
    ]  # members still to come of each open container; the outermost holds the one value
    while remaining:
        if remaining[-1] == 0:
            remaining.pop()
            continue
        remaining[-1] -= 1
        num_items += 1
        if num_items > max_items:
            raise ProtocolError(f"expected at most {max_items} values in a body, got more")
        if position >= size:
            raise ProtocolError("expected a whole msgpack value, got a truncated one")
        position, num_members = _one_header(body, position)
        if position > size:
            raise ProtocolError("expected a whole msgpack value, got a truncated one")
        if num_members is not None:
            remaining.append(num_members)
            if len(remaining) - 1 > max_depth:
                raise ProtocolError(f"expected at most {max_depth} nested containers, got more")
    if position != size:
        raise ProtocolError(f"expected one msgpack value, got {size - position} bytes after it")


_FIXED_BYTES = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **{0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},
    **{0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17},
}
"""Bytes after the first, of values whose size the first byte says."""
_SIZED_BYTES = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},
}
"""Bytes of the length field and bytes besides the length, of bin, ext and str."""
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count field and members per count, of arrays and maps."""


def _one_header(body: memoryview, position: int) -> tuple[int, int | None]:
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
    if first in _FIXED_BYTES:
        return position + _FIXED_BYTES[first], None
    if first in _SIZED_BYTES:
        width, extra = _SIZED_BYTES[first]
        length = int.from_bytes(body[position : position + width], "big")
        return position + width + length + extra, None
    if first in _COUNTED:
        width, members = _COUNTED[first]
        count = int.from_bytes(body[position : position + width], "big")
        return position + width, members * count
    raise ProtocolError("expected msgpack, got the unused byte 0xc1")


def _measure_stack_depth() -> int:
    """Containers the C parser can hold open; `_CEILING` when it shows no such bound, as the pure-Python one."""
    if "fallback" in msgpack.Unpacker.__module__:
        return _CEILING + _CEILING
    low, high = 1, _CEILING
    while low < high:
        middle = (low + high + 1) // 2
        unpacker = msgpack.Unpacker()
        unpacker.feed(b"\x91" * middle + b"\xc0")
        try:
            unpacker.skip()
        except msgpack.StackError:
            high = middle - 1
        else:
            low = middle
    return low


_STACK_DEPTH = _measure_stack_depth()
