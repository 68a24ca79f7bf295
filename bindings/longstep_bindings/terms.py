"""What a server grants each of its clients: how much may be in flight, how often both sides show that they live."""

from __future__ import annotations

from dataclasses import dataclass

from longstep.errors import ConfigError

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Told in the handshake and kept by both sides.

    >>> Terms(num_credits=8).heartbeat_s
    1.0
    """

    num_credits: int = 64
    """Most requests of one client that are unanswered or whose answer is unacknowledged; a further one waits."""
    heartbeat_s: float = 1.0
    """Time between a client's heartbeats; each is answered. Also how soon a lost message is noticed."""
    lost_after_s: float = 10.0
    """Silence after which either side gives the other up."""
    max_sessions: int = 256
    """Most clients at a time."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for terms that nobody could keep."""
        if not 1 <= self.num_credits <= 4096:
            raise ConfigError(f"expected `num_credits` from 1 to 4096, got {self.num_credits}")
        if self.heartbeat_s < 0.01 or self.lost_after_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "expected `heartbeat_s` of at least 0.01 and `lost_after_s` of at least twice that, "
                f"got {self.heartbeat_s} and {self.lost_after_s}"
            )
        if self.max_sessions < 1:
            raise ConfigError(f"expected `max_sessions` of at least 1, got {self.max_sessions}")
