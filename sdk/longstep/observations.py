"""Observations as text: what a prompt shows of a string, number, array, image, list or dict.

An *image* is a uint8 array [H, W, 3]. In a text it is the placeholder `<image>`; the pixels travel beside the text, in
the order of the placeholders. Anything else becomes text that two equal observations share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["IMAGE_PLACEHOLDER", "is_image", "observation_images", "observation_to_text"]

IMAGE_PLACEHOLDER = "<image>"
"""Stands in a text for an image."""

NEUTRAL_PLACEHOLDER = "<image >"
"""What a literal `<image>` inside other text becomes where it would be taken for an image."""


def is_image(value: Any) -> bool:
    """True for a uint8 array [H, W, 3] with at least one pixel."""
    if not isinstance(value, np.ndarray):
        return False
    array = cast(NDArray[Any], value)
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and array.size > 0


def observation_images(observation: Any) -> tuple[NDArray[np.uint8], ...]:
    """The images in an observation, in the order in which `observation_to_text` places them."""
    return tuple(_walk_images(observation))


def _walk_images(value: Any) -> Iterator[NDArray[np.uint8]]:
    if is_image(value):
        yield value
    elif isinstance(value, Mapping):
        for item in cast(Mapping[Any, Any], value).values():
            yield from _walk_images(item)
    elif isinstance(value, list | tuple):
        for item in cast(list[Any], value):
            yield from _walk_images(item)


def observation_to_text(observation: Any) -> str:
    r"""The text a prompt shows for an observation when the wrapper is given no function of its own.

    A str stays as it is. A dict gives a line for each key, in its own order; lists and tuples give comma-separated
    items; floats four significant digits; an array its numbers, abridged by numpy's `...` beyond 1,000 of them; an
    image the placeholder. Other objects give their `str`.

    >>> print(observation_to_text({"mission": "find the key", "position": np.array([1, 2])}))
    mission: find the key
    position: [1, 2]
    """
    if isinstance(observation, str):
        return str(observation)
    return _to_text(observation, literal=not observation_images(observation))


def _to_text(value: Any, *, literal: bool) -> str:
    if isinstance(value, str):
        return value if literal else value.replace(IMAGE_PLACEHOLDER, NEUTRAL_PLACEHOLDER)
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return _to_text(value.decode("utf-8", errors="replace"), literal=literal)
    if isinstance(value, np.generic):
        return _to_text(cast(Any, value).item(), literal=literal)
    if isinstance(value, float):
        return f"{value:.4g}"
    if is_image(value):
        return IMAGE_PLACEHOLDER
    if isinstance(value, np.ndarray):
        return _array_text(cast(NDArray[Any], value))
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return "\n".join(_entry(str(key), _to_text(item, literal=literal)) for key, item in items)
    if isinstance(value, list | tuple):
        items = [_to_text(item, literal=literal) for item in cast(list[Any], value)]
        return ("\n" if any("\n" in item for item in items) else ", ").join(items)
    return str(value)


def _entry(key: str, text: str) -> str:
    return f"{key}:\n{text}" if "\n" in text else f"{key}: {text}"


def _array_text(array: NDArray[Any]) -> str:
    if array.ndim == 0:
        return _to_text(array.item(), literal=True)
    return np.array2string(
        array, precision=4, suppress_small=True, separator=", ", threshold=1000, edgeitems=3,
        max_line_width=100,
    )  # fmt: skip
