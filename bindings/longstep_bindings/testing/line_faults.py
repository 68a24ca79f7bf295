"""`Faults`: how bad a line is."""

from __future__ import annotations

from dataclasses import dataclass, fields

from longstep.errors import ConfigError

__all__ = ["Faults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to messages, both ways; a message meets at most one of the first four.

    >>> Faults(drop=0.1, duplicate=0.1).reorder
    0.0
    """

    drop: float = 0.0
    """Share of messages that are lost."""
    duplicate: float = 0.0
    """Share of messages that arrive twice, the second time up to `late_s` later."""
    reorder: float = 0.0
    """Share of messages that arrive up to `late_s` late, so that others overtake them."""
    corrupt: float = 0.0
    """Share of messages with one frame damaged: cut short, or begun with a byte that msgpack never uses. A bit that flips
    inside a text is not tried: that is for the checksums of the transport below to notice. A damaged head is a lost message; a
    damaged body is a `ProtocolError` of the commands in it, for what they did is not known."""
    late_s: float = 0.2
    """Longest delay of a copy, and of what is overtaken."""
    slow_s: float = 0.0
    """Seconds that every message takes."""

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        for field in fields(self):
            if getattr(self, field.name) < 0.0:
                raise ConfigError(f"expected `{field.name}` of at least 0, got {self}")
        if self.drop + self.duplicate + self.reorder + self.corrupt > 1.0:
            raise ConfigError(f"expected shares of at most 1 together, got {self}")
