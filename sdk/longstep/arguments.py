"""Checks of arguments: the right kind of value, said by name before it fails somewhere deep inside."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from os import PathLike
from typing import Any, cast

import numpy as np

from longstep.errors import ConfigError, did_you_mean

__all__ = [
    "check_callable",
    "check_choice",
    "check_count",
    "check_flag",
    "check_mapping",
    "check_methods",
    "check_number",
    "check_path",
    "check_text",
    "check_texts",
]

_LISTS: tuple[type, ...] = (list, tuple)
_TEXT: frozenset[type] = frozenset((str,))


def check_count(
    name: str, value: Any, least: int | None, *, most: int | None = None, optional: bool = False
) -> None:
    """Raise unless `value` is a whole number between `least` and `most`, where these are given, or None where `optional`."""
    if optional and value is None:
        return
    or_none = " or None" if optional else ""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(f"expected a whole number{or_none} as `{name}`, got {value!r:.100}")
    if least is not None and number < least:
        raise ConfigError(f"expected `{name}` of at least {least}{or_none}, got {value}")
    if most is not None and number > most:
        raise ConfigError(f"expected `{name}` of at most {most}{or_none}, got {value}")


def check_number(name: str, value: Any) -> None:
    """Raise unless `value` is one real number; infinity and NaN are numbers too."""
    if type(value) is float:  # the usual case, quickly
        return
    scalar: Any = value
    if isinstance(value, np.ndarray) and cast(Any, value).ndim == 0:
        scalar = cast(Any, value)[()]
    try:
        if type(scalar) is not bool and isinstance(scalar, Real):
            float(scalar)
            return
    except OverflowError:  # an int or a fraction beyond the range of floats
        pass
    raise ConfigError(f"expected a number as `{name}`, got {value!r:.100}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"expected True or False as `{name}`, got {value!r:.100}")


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Raise unless `value` is one of `choices`; the nearest of them is suggested."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        hint = did_you_mean(str(value), [choice for choice in choices if choice is not None])
        raise ConfigError(
            f"expected `{name}` to be one of {', '.join(map(repr, choices))}, got {value!r:.100}; {hint}"
        )


def check_text(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise unless `value` is a str, or None where `optional`."""
    if not isinstance(value, str) and not (optional and value is None):
        or_none = " or None" if optional else ""
        raise ConfigError(f"expected a str{or_none} as `{name}`, got {value!r:.100}")


def check_texts(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise unless `value` is a sequence of str, not one str, or None where `optional`."""
    if optional and value is None:
        return
    if type(value) in _LISTS and _TEXT.issuperset(
        map(type, cast("list[Any]", value))
    ):  # the usual case, quickly
        return
    or_none = " or None" if optional else ""
    is_sequence = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    if not is_sequence:
        raise ConfigError(f"expected a sequence of str{or_none} as `{name}`, got {value!r:.100}")
    for index, text in enumerate(cast("Sequence[Any]", value)):
        if not isinstance(text, str):
            raise ConfigError(f"expected a str as `{name}[{index}]`, got {text!r:.100}")


def check_mapping(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise unless `value` maps names (str) to values, or is None where `optional`."""
    if type(value) is dict and _TEXT.issuperset(map(type, cast("dict[Any, Any]", value))):
        return
    if optional and value is None:
        return
    or_none = " or None" if optional else ""
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected a dict{or_none} as `{name}`, got {value!r:.100}")
    for key in cast("Mapping[Any, Any]", value):
        if not isinstance(key, str):
            raise ConfigError(f"expected names as the keys of `{name}`, got {key!r:.100}")


def check_path(name: str, value: Any) -> None:
    """Raise unless `value` is a path: a str or an `os.PathLike` of one."""
    if not isinstance(value, str | PathLike) or not isinstance(os.fspath(cast(Any, value)), str):
        raise ConfigError(f"expected a path as `{name}`, got {value!r:.100}")


def check_callable(name: str, value: Any) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise ConfigError(f"expected a function as `{name}`, got {value!r:.100}")


def check_methods(name: str, value: Any, kind: str, methods: Iterable[str]) -> None:
    """Raise unless `value` is an object, not a class, with these methods; `kind` says what it should be."""
    if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in methods):
        raise ConfigError(f"expected {kind} as `{name}`, got {value!r:.200}")
