"""The typed face of msgpack for plain values: headers, heads and whatever holds no arrays."""

from __future__ import annotations

from typing import Any

import msgpack

from longstep.errors import ProtocolError

__all__ = ["pack", "unpack"]


def pack(value: Any) -> bytes:
    """The msgpack bytes of a plain value."""
    data: bytes = msgpack.Packer().pack(value)
    return data


def unpack(data: bytes, **limits: int) -> Any:
    """The plain value of msgpack bytes that have been checked for size.

    Args:
        data: One whole msgpack value.
        limits: msgpack's own, such as `max_array_len`.

    Raises:
        ProtocolError: They are not msgpack, or exceed the limits.
    """
    try:
        return msgpack.unpackb(data, strict_map_key=True, **limits)
    except Exception as error:  # the parser's own errors, of several unrelated classes
        raise ProtocolError(f"expected msgpack, got {type(error).__name__}") from None
