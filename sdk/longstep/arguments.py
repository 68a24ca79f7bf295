"""Checks of arguments: the right kind of value, said by name before it fails somewhere deep inside."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from longstep.errors import ConfigError

__all__ = ["check_callable", "check_count", "check_methods", "check_number", "check_text"]


def check_count(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise unless `value` is a whole number of at least `least`, or None where `optional`."""
    if optional and value is None:
        return
    or_none = " or None" if optional else ""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(f"expected a whole number{or_none} as `{name}`, got {value!r:.100}")
    if number < least:
        raise ConfigError(f"expected `{name}` of at least {least}{or_none}, got {value}")


def check_number(name: str, value: Any) -> None:
    """Raise unless `value` is a real number; infinity and NaN are numbers too."""
    if isinstance(value, str | bytes | bool) or not hasattr(value, "__float__"):
        raise ConfigError(f"expected a number as `{name}`, got {value!r:.100}")


def check_text(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise unless `value` is a str, or None where `optional`."""
    if not isinstance(value, str) and not (optional and value is None):
        or_none = " or None" if optional else ""
        raise ConfigError(f"expected a str{or_none} as `{name}`, got {value!r:.100}")


def check_callable(name: str, value: Any) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise ConfigError(f"expected a function as `{name}`, got {value!r:.100}")


def check_methods(name: str, value: Any, kind: str, methods: Iterable[str]) -> None:
    """Raise unless `value` is an object, not a class, with these methods; `kind` says what it should be."""
    if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in methods):
        raise ConfigError(f"expected {kind} as `{name}`, got {value!r:.200}")
