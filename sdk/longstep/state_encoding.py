"""The canonical form of an observation: the bytes that `longstep.state_key` hashes.

What the forms are is told there. The hash is an argument: `state_key` passes XXH3, the checked mode a cryptographic one.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError, LongstepError, UnsupportedTypeError

__all__ = [
    "MAX_DEPTH",
    "Digest",
    "array_header",
    "canonical_array",
    "digest_observation",
    "shorten",
    "type_name",
    "utf8",
]

MAX_DEPTH = 64
"""How many containers may enclose a value."""

Digest: TypeAlias = Callable[[Any], bytes]
"""A hash of a bytes-like object."""

_NAN = struct.pack("<d", math.nan)
_SUPPORTED = (
    "str, bytes, bool, int, float, None, numpy scalars and arrays of numbers or text, PIL images, "
    "and list, tuple, set, dict of these"
)


class _RejectedError(Exception):
    """A part of an observation that cannot be hashed; containers add to the path on the way out."""

    def __init__(self, error: type[LongstepError], expected: str, got: str, remedy: str) -> None:
        super().__init__(expected)
        self.error, self.expected, self.got, self.remedy = error, expected, got, remedy
        self.path: list[str] = []

    def public(self) -> LongstepError:
        parts = self.path[::-1]
        if len(parts) > 12:
            parts = [*parts[:6], " ... ", *parts[-3:]]
        path = "$" + "".join(parts)
        return self.error(f"expected {self.expected}, got {self.got} at `{path}`; {self.remedy}")


def digest_observation(observation: Any, digest: Digest) -> bytes:
    """The digest of the canonical form of `observation`; errors as `state_key` documents them."""
    try:
        return _digest_value(observation, digest, 0)
    except _RejectedError as rejected:
        raise rejected.public() from None


def _digest_value(value: object, digest: Digest, depth: int) -> bytes:
    """The key of one value; `digest` is the hash, which `CheckedStateKey` exchanges for a cryptographic one."""
    encode = _ENCODERS.get(type(value))
    if encode is None:
        encode = _encoder_of(value)
    if depth > MAX_DEPTH:
        raise _RejectedError(
            DataError,
            f"at most {MAX_DEPTH} levels of nesting",
            "more",
            "flatten it with `canonicalize`, or look for a container that contains itself",
        )
    return digest(encode(value, digest, depth))


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text, with those of lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, as file names decoded by Python may have
        return text.encode("utf-8", "surrogatepass")


def _encode_str(value: str, digest: Digest, depth: int) -> bytes:
    return utf8(value)


def _encode_bytes(value: bytes, digest: Digest, depth: int) -> bytes:
    return b"".join((b"\xffy", value))  # also of np.bytes_, whose + is numpy's


def _encode_none(value: None, digest: Digest, depth: int) -> bytes:
    return b"\xffn"


def _encode_bool(value: Any, digest: Digest, depth: int) -> bytes:
    return b"\xffb\x01" if value else b"\xffb\x00"


def _encode_int(value: Any, digest: Digest, depth: int) -> bytes:
    number = int(value)
    return b"\xffi" + number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _encode_float(value: Any, digest: Digest, depth: int) -> bytes:
    number = float(value) + 0.0  # -0.0 becomes 0.0
    return b"\xfff" + (_NAN if number != number else struct.pack("<d", number))


def _encode_items(items: Sequence[Any], tag: bytes, digest: Digest, depth: int) -> bytes:
    keys = [tag]
    try:
        for item in items:
            keys.append(_digest_value(item, digest, depth + 1))
    except _RejectedError as rejected:
        rejected.path.append(f"[{len(keys) - 1}]")
        raise
    return b"".join(keys)


def _encode_list(value: list[Any], digest: Digest, depth: int) -> bytes:
    return _encode_items(value, b"\xffl", digest, depth)


def _encode_tuple(value: tuple[Any, ...], digest: Digest, depth: int) -> bytes:
    return _encode_items(value, b"\xfft", digest, depth)


def _encode_set(value: Iterable[Any], digest: Digest, depth: int) -> bytes:
    try:
        keys = sorted(_digest_value(member, digest, depth + 1) for member in value)
    except _RejectedError as rejected:
        rejected.path.append("{member}")
        raise
    return b"\xffs" + b"".join(keys)


def _encode_dict(value: dict[Any, Any], digest: Digest, depth: int) -> bytes:
    pairs: list[bytes] = []
    name: Any = None
    try:
        for name, item in value.items():
            name_key = _digest_value(name, digest, depth + 1)
            pairs.append(name_key + _digest_value(item, digest, depth + 1))
    except _RejectedError as rejected:
        simple = isinstance(name, str) and name.isidentifier()
        rejected.path.append(f".{name}" if simple else f"[{shorten(name)}]")
        raise
    return b"\xffd" + b"".join(sorted(pairs))


def _encode_array(value: NDArray[Any], digest: Digest, depth: int) -> bytes:
    return array_header(value.dtype, value.shape) + digest(canonical_array(value))


def _encode_image(value: Any, digest: Digest, depth: int) -> bytes:
    palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
    pixels = _encode_array(np.asarray(value), digest, depth)
    return b"\xffp" + value.mode.encode() + b"\x00" + bytes(palette or ()) + pixels


def array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What stands before the digest of an array's elements in its canonical form."""
    supported = dtype.kind in "biuUS" or (dtype.kind == "f" and dtype.itemsize <= 8)
    if not supported and not (dtype.kind == "c" and dtype.itemsize <= 16):
        raise _RejectedError(
            UnsupportedTypeError,
            "an array of bool, integers, floats or complex numbers of at most 64 bits, or text",
            f"dtype {dtype}",
            "convert it, an object array by `.tolist()`",
        )
    return b"\xffa" + f"{dtype.kind}{dtype.itemsize}:{','.join(map(str, shape))}:".encode()


def canonical_array(array: NDArray[Any]) -> NDArray[Any]:
    """The elements in C order and little-endian, one NaN, no -0.0; the array itself where it is so already."""
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if array.dtype.kind in "fc":
        parts = array.view(f"<f{array.itemsize // (2 if array.dtype.kind == 'c' else 1)}")
        with np.errstate(invalid="ignore"):  # a signalling NaN
            array = parts + parts.dtype.type(0)
        array[np.isnan(array)] = np.nan
        array = array.astype(parts.dtype, copy=False)  # arithmetic gives the machine's byte order
    return array


_ENCODERS: dict[type, Callable[[Any, Digest, int], bytes]] = {
    str: _encode_str,
    bytes: _encode_bytes,
    bool: _encode_bool,
    int: _encode_int,
    float: _encode_float,
    list: _encode_list,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_set,
    dict: _encode_dict,
    type(None): _encode_none,
    np.ndarray: _encode_array,
    np.bool_: _encode_bool,
}


def _encoder_of(value: Any) -> Callable[[Any, Digest, int], bytes]:
    """The encoder of a value whose exact type is not in the table: a subclass, a numpy scalar, an image."""
    if isinstance(value, np.ma.MaskedArray):  # its mask would be lost
        raise _unsupported(value)
    for base, encode in _ENCODERS.items():
        if isinstance(value, base):
            return encode
    if isinstance(value, np.integer) and not isinstance(value, np.timedelta64):
        return _encode_int
    if isinstance(value, np.floating) and cast(np.floating[Any], value).itemsize <= 8:
        return _encode_float
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(value, pil.Image):
        return _encode_image
    raise _unsupported(value)


def _unsupported(value: Any) -> _RejectedError:
    return _RejectedError(
        UnsupportedTypeError,
        _SUPPORTED,
        type_name(value),
        "convert it with `canonicalize`, such as a tensor to an array or a dataclass to a dict",
    )


def type_name(value: object) -> str:
    """The name of the type of `value`, with its module unless it is built in."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def shorten(value: Any) -> str:
    """The repr of `value`, at most 60 characters of it, for error messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
