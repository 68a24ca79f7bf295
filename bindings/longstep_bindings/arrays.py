"""Arrays and numpy scalars inside a message body.

A large array travels as a raw frame of its own; the body holds a reference: ext code 1, whose payload is the msgpack
array [index, dtype, shape]. A small array or a numpy scalar is cheaper inline: ext code 2, whose payload is the msgpack
array [dtype, shape] followed by the bytes; a scalar has nil for its shape. Bytes are little-endian and in C order.

Sending copies an array once: a reply is kept for a possible repeat, and an environment may write its next observation
into the same buffer. Receiving copies nothing: the array is a read-only view of the received frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from longstep.errors import ProtocolError, UnsupportedTypeError
from longstep_bindings.packing import pack, unpack

__all__ = ["ARRAY_REFERENCE", "INLINE_ARRAY", "INLINE_BYTES", "ArrayReader", "pack_array"]

ARRAY_REFERENCE = 1
INLINE_ARRAY = 2
INLINE_BYTES = 4096
"""Arrays up to this size travel inline: a frame of its own costs more than copying that much."""
_MAX_DIMENSIONS = 16
_MAX_HEADER_BYTES = 256
_NAMES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")  # fmt: skip
_DTYPES = {name: np.dtype(name) for name in _NAMES}
"""Booleans, integers, floats and complex numbers; one byte wide is `|`, wider is little-endian."""


def pack_array(array: np.ndarray[Any, Any] | np.generic, frames: list[bytes]) -> msgpack.ExtType:
    """The ext value that stands for `array` in a body; a large array's bytes are appended to `frames`.

    Raises:
        UnsupportedTypeError: The dtype is not a number or a boolean.
    """
    dtype = array.dtype if array.dtype.byteorder == "|" else array.dtype.newbyteorder("<")
    if dtype.str not in _DTYPES:
        raise UnsupportedTypeError(
            f"expected an array of booleans or numbers, got dtype {array.dtype}; "
            "send a list, or convert it"
        )
    if array.ndim > _MAX_DIMENSIONS:
        raise UnsupportedTypeError(
            f"expected an array of at most {_MAX_DIMENSIONS} dimensions, got {array.ndim}"
        )
    data = np.asarray(array).astype(dtype, copy=False).tobytes()
    shape = None if isinstance(array, np.generic) else array.shape
    if len(data) <= INLINE_BYTES:
        return msgpack.ExtType(INLINE_ARRAY, pack([dtype.str, shape]) + data)
    frames.append(data)
    return msgpack.ExtType(ARRAY_REFERENCE, pack([len(frames) - 1, dtype.str, shape]))


class ArrayReader:
    """Turns the ext values of one body back into arrays; each raw frame belongs to exactly one of them."""

    def __init__(self, frames: Sequence[bytes | memoryview]) -> None:
        """Args:
        frames: The raw frames of the message, in order.
        """
        self._frames = frames
        self._unread = set(range(len(frames)))

    def read(self, code: int, payload: bytes) -> Any:
        """The array or numpy scalar that an ext value stands for."""
        if code == ARRAY_REFERENCE:
            return self._read_reference(payload)
        if code == INLINE_ARRAY:
            return _read_inline(payload)
        raise ProtocolError(f"expected ext code 1, 2 or 3, got {code}")

    def finish(self) -> None:
        """Raise when a frame was sent that nothing in the body refers to."""
        if self._unread:
            raise ProtocolError(
                f"expected every frame to be used, raw frame {min(self._unread)} is not"
            )

    def _read_reference(self, payload: bytes) -> np.ndarray[Any, Any]:
        if len(payload) > _MAX_HEADER_BYTES:
            raise ProtocolError(f"expected an array header of at most {_MAX_HEADER_BYTES} bytes")
        header = _unpack_header(payload, 3)
        index, dtype, shape = header[0], _check_dtype(header[1]), _check_shape(header[2])
        if type(index) is not int or index not in self._unread:
            raise ProtocolError(
                f"expected the index of an unused raw frame below {len(self._frames)}, "
                f"got {index!r:.80}"
            )
        self._unread.remove(index)
        return _view(self._frames[index], dtype, shape)


def _read_inline(payload: bytes) -> Any:
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_HEADER_BYTES, max_array_len=_MAX_DIMENSIONS)
    unpacker.feed(payload[:_MAX_HEADER_BYTES])
    try:
        header = unpacker.unpack()
    except Exception as error:  # the parser's own errors, of several unrelated classes
        raise ProtocolError(f"expected an array header, got {type(error).__name__}") from None
    if type(header) is not list or len(header) != 2:
        raise ProtocolError("expected [dtype, shape] before the bytes of an inline array")
    dtype = _check_dtype(header[0])
    data = memoryview(payload)[unpacker.tell() :]
    if header[1] is None:
        return _view(data, dtype, ())[()]
    return _view(data, dtype, _check_shape(header[1]))


def _unpack_header(payload: bytes, length: int) -> list[Any]:
    header = unpack(payload, max_array_len=_MAX_DIMENSIONS, max_map_len=0)
    if type(header) is not list or len(header) != length:
        raise ProtocolError(f"expected an array header of {length} parts, got {header!r:.80}")
    return header


def _check_dtype(text: Any) -> np.dtype[Any]:
    dtype = _DTYPES.get(text) if type(text) is str else None
    if dtype is None:
        raise ProtocolError(
            f"expected a dtype such as `<f4`, or `|u1` for one byte, got {text!r:.80}"
        )
    return dtype


def _check_shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS:
        raise ProtocolError(f"expected at most {_MAX_DIMENSIONS} dimensions, got {shape!r:.80}")
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 40:
            raise ProtocolError(f"expected sizes from 0 to 2**40, got {shape!r:.80}")
    return tuple(shape)


def _view(
    data: bytes | memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """A read-only view; Python's integers do not overflow, so the product is exact."""
    expected = math.prod(shape) * dtype.itemsize
    size = len(data)
    if expected != size:
        raise ProtocolError(
            f"expected {expected} bytes for an array {dtype.str}{list(shape)}, got {size}"
        )
    if not expected:
        array = np.empty(shape, dtype) if max(shape) < 1 << 31 else _too_large(shape)
    else:
        array = np.frombuffer(data, dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _too_large(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    raise ProtocolError(f"expected sizes below 2**31 in an empty array, got {list(shape)}")
