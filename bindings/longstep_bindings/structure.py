"""What may stand in a message, and the place of what may not.

`complaint` walks a value by its paths. That is slow, so it is asked only once something is known, or suspected, to be
wrong. A dict's keys and a set's members are scalars: nobody can choose many of them that hash alike, as with tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from longstep.errors import UnsupportedTypeError
from longstep_bindings.limits import Limits

__all__ = ["as_plain", "complaint", "is_scalar"]

_SCALARS = frozenset((str, int, float, bool, bytes, type(None)))
_CONTAINERS = frozenset((list, dict, tuple, set, frozenset))
_ALLOWED = "None, bool, int, float, str, bytes, list, tuple, set, dict or a numpy array of numbers"


def is_scalar(key: Any) -> bool:
    """True for what may be a key: a scalar, a subclass of one, or a numpy scalar that is not complex."""
    if isinstance(key, np.generic):
        return key.dtype.kind in "biuf"
    return type(key) in _SCALARS or isinstance(key, str | int | float)


def as_plain(value: Any) -> Any:
    """The built-in value that a subclass or a mapping refines; anything else as it is."""
    if type(value) in _CONTAINERS or isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic) and not isinstance(value, str | bytes):
        return value
    for base, convert in _REFINED.items():
        if isinstance(value, base):
            return convert(value)
    return value


_REFINED: dict[type, Callable[[Any], Any]] = {
    bool: bool,
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes,
    Mapping: dict,
    tuple: tuple,
    list: list,
    set: set,
    frozenset: frozenset,
}


def complaint(
    value: Any, limits: Limits, pack_leaf: Callable[[Any], Any], place: str = "$", depth: int = 0
) -> str | None:
    """What is wrong with the first value that cannot travel, and where; None when all can.

    Args:
        value: What was to be sent.
        limits: For the depth.
        pack_leaf: Packs one value that is not a container, or raises.
        place: Path of `value`, for the message.
        depth: Number of containers around `value`.
    """
    plain = as_plain(value)
    if type(plain) not in _CONTAINERS:
        return _leaf_complaint(plain, pack_leaf, place)
    if depth == limits.max_depth:
        return f"expected at most {limits.max_depth} nested containers, got more at {place[:200]}"
    if isinstance(plain, dict | set | frozenset):
        for key in plain:
            if not is_scalar(key):
                return f"expected a key that is a scalar, got {_told(key)} in {place}; use a str"
            found = _leaf_complaint(as_plain(key), pack_leaf, f"a key of {place}")
            if found:
                return found
    if isinstance(plain, dict):
        members = ((f"{place}.{key}", member) for key, member in plain.items())
    else:
        members = ((f"{place}[{index}]", member) for index, member in enumerate(plain))
    for member_place, member in members:
        found = complaint(member, limits, pack_leaf, member_place, depth + 1)
        if found:
            return found
    return None


def _leaf_complaint(value: Any, pack_leaf: Callable[[Any], Any], place: str) -> str | None:
    if (
        isinstance(value, float | np.inexact)
        and not isinstance(value, np.ndarray)
        and value != value
    ):
        return f"expected a number, got NaN at {place}; send None instead"
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return f"expected an integer of at most 64 bits, got {value:.3g} at {place}; send a str"
    try:
        pack_leaf(value)
    except UnicodeEncodeError as error:
        return f"expected text that UTF-8 can encode, got {error.reason} at {place}"
    except UnsupportedTypeError as error:
        return f"{error} (at {place})"
    except Exception:  # msgpack raises several unrelated classes
        return f"expected {_ALLOWED}, got {_told(value)} at {place}; convert it"
    return None


def _told(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
