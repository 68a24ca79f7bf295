"""Values that may cross a process or a language: what msgpack can carry, checked without msgpack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["complain"]

_MAX_DEPTH = 64


def complain(value: Any, place: str = "value") -> str:
    """What keeps a value from being carried, and where; empty when nothing does.

    Allowed are None, bool, int of 64 bits, float except NaN, str, bytes, lists, tuples, dicts with str or int keys, and
    numpy arrays and scalars of booleans and numbers.

    >>> complain({"inventory": ["key", {1, 2}]}, "info")
    'a set at info["inventory"][1]'
    """
    return _complain(value, place, _MAX_DEPTH)


def _complain(value: Any, place: str, depth: int) -> str:
    if depth == 0:
        return f"more than {_MAX_DEPTH} levels at {place}"
    if value is None or isinstance(value, bool | bytes):
        return ""
    if isinstance(value, np.ndarray | np.generic):
        dtype = cast("NDArray[Any]", value).dtype
        return "" if dtype.kind in "biufc" else f"an array of dtype {dtype} at {place}"
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**64 else f"an int beyond 64 bits at {place}"
    if isinstance(value, float):
        return "" if value == value else f"NaN at {place}"
    if isinstance(value, str):
        return _complain_text(value, place)
    if isinstance(value, list | tuple):
        entries = enumerate(cast(list[Any], value))
        problems = (_complain(item, f"{place}[{index}]", depth - 1) for index, item in entries)
        return next(filter(None, problems), "")
    if isinstance(value, dict):
        return _complain_dict(cast(Mapping[Any, Any], value), place, depth)
    return f"a {type(value).__name__} at {place}"


def _complain_dict(value: Mapping[Any, Any], place: str, depth: int) -> str:
    for key, item in value.items():
        if isinstance(key, bool) or not isinstance(key, str | int):
            return f"a key of type {type(key).__name__} in {place}"
        shown = f'{place}["{key}"]' if isinstance(key, str) else f"{place}[{key}]"
        problem = _complain(key, f"a key of {place}", depth) or _complain(item, shown, depth - 1)
        if problem:
            return problem
    return ""


def _complain_text(text: str, place: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return f"a str with a lone surrogate at {place}"
    return ""
