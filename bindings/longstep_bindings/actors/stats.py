"""Numbers to watch: load, counts and rates of a pool and of its actors."""

from __future__ import annotations

import time
from dataclasses import dataclass

from longstep_bindings.actors.link import ActorLink, State
from longstep_bindings.engines.served import EngineStats

__all__ = ["ActorStats", "PoolStats", "Rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStats:
    """One actor now."""

    address: str
    state: State
    policy_version: int
    num_owed: int
    """Requests that it has and has not answered."""
    num_restarts: int
    num_transfers: int
    """Times that it was given weights, those of a restart included."""
    engine: EngineStats
    """Queue depth and counts, since this actor process started."""
    tokens_per_s: float
    """Tokens sampled a second since the last `stats`."""
    cache_hit_share: float
    """Share of prompt tokens that were found computed, since the last `stats`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool now."""

    policy_version: int
    num_queued: int
    """Requests that wait in the pool for room at an actor."""
    num_in_flight: int
    num_resubmitted: int
    """Times that a request was handed over again because its actor had died."""
    num_restarts: int
    num_updates: int
    """Weight updates, each one transfer to each actor."""
    actors: tuple[ActorStats, ...]


class Rates:
    """What actors did since they were asked last."""

    def __init__(self) -> None:
        """Nobody was asked."""
        self._last: dict[int, tuple[float, EngineStats]] = {}

    def stats_of(self, link: ActorLink) -> ActorStats:
        """One actor's numbers, with rates since the last call for it."""
        now, counts = time.monotonic(), link.lane.counts
        then, before = self._last.get(link.index, (now, counts))
        if counts.num_completions < before.num_completions:  # another process
            before = EngineStats()
        self._last[link.index] = (now, counts)
        num_read = counts.prompt_tokens - before.prompt_tokens
        num_cached = counts.cached_prompt_tokens - before.cached_prompt_tokens
        generated = counts.generated_tokens - before.generated_tokens
        return ActorStats(
            address=link.address,
            state=link.state,
            policy_version=link.policy_version,
            num_owed=link.lane.load,
            num_restarts=link.num_restarts,
            num_transfers=link.num_transfers,
            engine=counts,
            tokens_per_s=generated / (now - then) if now > then else 0.0,
            cache_hit_share=num_cached / num_read if num_read > 0 else 0.0,
        )
