"""How much a peer may send: hard limits, checked before anything is allocated for what it claims to have sent.

A limit is a promise to the receiver, so both ends of a connection may hold different ones; the sender checks its own
and reports the offending value, the receiver drops what exceeds its own with a `ProtocolError`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from longstep.errors import ConfigError

__all__ = ["DEFAULT_LIMITS", "Limits"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest message that is read or written.

    >>> Limits(max_depth=8).max_depth
    8
    """

    max_head_bytes: int = 64 * 1024
    """Size of the head frame, which names the request."""
    max_body_bytes: int = 16 * MIB
    """Size of the body frame, which holds the structured value."""
    max_frame_bytes: int = 64 * MIB
    """Size of one raw frame, which holds one array."""
    max_frames: int = 1024
    """Number of raw frames of one message."""
    max_message_bytes: int = 256 * MIB
    """Size of all frames of one message together."""
    max_depth: int = 32
    """Containers within containers in a body."""
    max_items: int = MIB
    """Values in a body, containers and their members alike. No body is decoded that holds more."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a limit that lets nothing through."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ConfigError(f"expected `{field.name}` of at least 1, got {value}")


DEFAULT_LIMITS = Limits()
"""What both ends use unless told otherwise."""
