"""Checks of single settings; each error names the key and what came."""

from __future__ import annotations

import math
from collections.abc import Collection

from longstep.errors import ConfigError, did_you_mean

__all__ = ["above", "at_least", "one_of", "within"]


def at_least(bound: float, value: float, key: str) -> None:
    """Raise unless a finite `value` is at least `bound`."""
    if not bound <= value < math.inf:  # also refuses NaN
        raise ConfigError(f"expected at least {bound}, got {value} at `{key}`; raise it")


def above(bound: float, value: float, key: str) -> None:
    """Raise unless a finite `value` is above `bound`."""
    if not bound < value < math.inf:
        raise ConfigError(
            f"expected a finite number above {bound}, got {value} at `{key}`; change it"
        )


def within(low: float, high: float, value: float, key: str, *, upper_open: bool = False) -> None:
    """Raise unless `value` lies in the interval."""
    if not low <= value <= high or (upper_open and value == high):
        interval = f"[{low}, {high}{')' if upper_open else ']'}"
        raise ConfigError(f"expected a number in {interval}, got {value} at `{key}`; change it")


def one_of(known: Collection[str], value: str, key: str) -> None:
    """Raise unless `value` is one of the names."""
    if value not in known:
        names = ", ".join(f"`{name}`" for name in known)
        near = did_you_mean(value, known)
        advice = near if near.startswith("did") else "take one of them"
        raise ConfigError(f"expected one of {names}, got `{value}` at `{key}`; {advice}")
