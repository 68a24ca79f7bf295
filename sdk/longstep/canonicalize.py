"""Canonicalizers: what to take out of an observation before its state key, so that one state has one key.

Each is a function of an observation that gives a new one, for `state_key(..., canonicalize=)`. They reach into lists,
tuples, sets and the values of dicts, change the parts they are meant for and leave every other part as it is. All of
them, combined ones too, can be pickled. Your own is any function of one argument.

>>> from longstep.state_key import state_key
>>> tidy = chain(drop_digits, lower, collapse_spaces)
>>> state_key("Step 3:  a Kitchen", canonicalize=tidy) == state_key("Step 14: a kitchen", canonicalize=tidy)
True
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_callable, check_count
from longstep.errors import DataError
from longstep.state_encoding import MAX_DEPTH
from longstep.state_key import state_key

__all__ = [
    "Canonicalizer",
    "chain",
    "collapse_spaces",
    "crop_image",
    "drop_digits",
    "drop_timestamps",
    "lower",
    "round_floats",
    "sort_lines",
    "sort_lists",
    "strip",
]

Canonicalizer: TypeAlias = Callable[[Any], Any]
"""A function of an observation that gives what its key is made of."""

_DIGITS = re.compile(r"\d+")
_SPACES = re.compile(r"\s+")
_ZONE = r"(?:\s?(?:Z|UTC|[+-]\d{2}:?\d{2})\b)?"
_TIME = rf"\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?{_ZONE}"
_DATE = r"(?:\d{4}-\d{2}-\d{2}|\d{4}/\d{1,2}/\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{4})"
_TIMESTAMPS = re.compile(rf"(?<![\d:./-])(?:{_DATE}(?:(?:T|,?\s){_TIME})?|{_TIME})(?![\d:])")


def chain(*canonicalizers: Canonicalizer) -> Canonicalizer:
    """One canonicalizer that applies several, the first one first."""
    for index, canonicalize in enumerate(canonicalizers):
        check_callable(f"canonicalizers[{index}]", canonicalize)
    return partial(_apply_all, canonicalizers)


def drop_digits(observation: Any) -> Any:
    """Without the digits of every text: for counters, scores and coordinates that are not part of the state.

    >>> drop_digits("Turn 12. Gold: 7.")
    'Turn . Gold: .'
    """
    return _map_texts(observation, partial(_DIGITS.sub, ""))


def drop_timestamps(observation: Any) -> Any:
    """Without the dates (ISO, 2026/1/31, 31.1.2026, 1/31/2026) and times of day (ISO, 9:05, 9:05:01 PM) of every text.

    >>> drop_timestamps("[2026-11-30T12:03:43Z] 3 new mails, last at 9:05 am")
    '[] 3 new mails, last at '
    """
    return _map_texts(observation, partial(_TIMESTAMPS.sub, ""))


def lower(observation: Any) -> Any:
    """With every text in lower case."""
    return _map_texts(observation, str.lower)


def strip(observation: Any) -> Any:
    """Without the white space at both ends of every text."""
    return _map_texts(observation, str.strip)


def collapse_spaces(observation: Any) -> Any:
    """With each run of white space, line breaks too, as one space, and none at the ends of a text."""
    return _map_texts(observation, _collapse_spaces)


def sort_lines(observation: Any) -> Any:
    """With the lines of every text in sorted order: for listings whose order means nothing."""
    return _map_texts(observation, _sort_lines)


def sort_lists(observation: Any) -> Any:
    """With the items of every list and tuple in the order of their state keys, so that their order does not count."""
    return _map(observation, _same, sort=True)


def round_floats(decimals: int) -> Canonicalizer:
    """A canonicalizer that rounds floats and float arrays to `decimals` places, at most 20; negative ones round to tens.

    >>> round_floats(1)({"at": (0.123, 2)})
    {'at': (0.1, 2)}
    """
    check_count("decimals", decimals, -20, most=20)
    return partial(_map, change=partial(_round, decimals=int(decimals)))


def crop_image(*, top: int = 0, bottom: int = 0, left: int = 0, right: int = 0) -> Canonicalizer:
    """A canonicalizer that cuts rows and columns off the sides of images: score bars, clocks, frame counters.

    Args:
        top: Pixels cut off at the top; `bottom`, `left` and `right` likewise. At least 0.
        bottom: See `top`.
        left: See `top`.
        right: See `top`.

    Images are arrays [H, W] or [H, W, C] and PIL images. One that is not larger than what is cut off is a `DataError`.
    """
    margins = (top, bottom, left, right)
    for name, margin in zip(("top", "bottom", "left", "right"), margins, strict=True):
        check_count(name, margin, 0)
    return partial(_map, change=partial(_crop, margins=margins))


def _apply_all(canonicalizers: tuple[Canonicalizer, ...], observation: Any) -> Any:
    for canonicalize in canonicalizers:
        observation = canonicalize(observation)
    return observation


def _map(value: Any, change: Callable[[Any], Any], *, sort: bool = False, depth: int = 0) -> Any:
    """`value` with `change` applied to every part that is no container."""
    if depth > MAX_DEPTH:
        raise DataError(
            f"expected at most {MAX_DEPTH} levels of nesting, got more in an observation; look for a container that "
            "contains itself"
        )
    below = partial(_map, change=change, sort=sort, depth=depth + 1)
    if isinstance(value, dict):
        return {name: below(item) for name, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        items = [below(item) for item in cast("list[Any]", value)]
        if sort:
            items.sort(key=state_key)
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return frozenset(below(member) for member in cast("set[Any]", value))
    return change(value)


def _map_texts(observation: Any, change: Callable[[str], str]) -> Any:
    if isinstance(observation, str):
        return change(observation)
    return _map(observation, partial(_change_text, change))


def _change_text(change: Callable[[str], str], value: Any) -> Any:
    return change(value) if isinstance(value, str) else value


def _same(value: Any) -> Any:
    return value


def _collapse_spaces(text: str) -> str:
    return _SPACES.sub(" ", text).strip()


def _sort_lines(text: str) -> str:
    return "\n".join(sorted(text.splitlines()))


def _round(value: Any, decimals: int) -> Any:
    if isinstance(value, float):
        return round(value, decimals)
    if isinstance(value, np.floating | np.ndarray):
        number = cast("NDArray[Any]", value)
        return number.round(decimals) if number.dtype.kind in "fc" else number
    return value


def _crop(value: Any, margins: tuple[int, int, int, int]) -> Any:
    top, bottom, left, right = margins
    if isinstance(value, np.ndarray):
        image = cast("NDArray[Any]", value)
        if image.ndim not in (2, 3):
            return image
        height, width = image.shape[:2]
        _require_larger(height, width, margins)
        return image[top : height - bottom, left : width - right]
    if hasattr(value, "getbbox") and hasattr(value, "crop"):  # a PIL image
        width, height = value.size
        _require_larger(height, width, margins)
        return value.crop((left, top, width - right, height - bottom))
    return value


def _require_larger(height: int, width: int, margins: tuple[int, int, int, int]) -> None:
    top, bottom, left, right = margins
    if top + bottom >= height or left + right >= width:
        raise DataError(
            f"expected an image larger than the {top} + {bottom} rows and {left} + {right} columns cut off by "
            f"`crop_image`, got {height} x {width}; cut off less"
        )
