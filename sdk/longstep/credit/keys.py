"""State keys in any of the forms people have them, as 64-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from longstep.credit.columns import as_array, require_length
from longstep.errors import UnsupportedTypeError

__all__ = ["key_words"]

_KEY_BYTES = 16


def key_words(state_keys: Any, num_rows: int) -> NDArray[np.uint64]:
    """[N, W] words that are equal exactly where the keys are.

    Args:
        state_keys: [N] array of 16-byte voids (what `RolloutBatch.to_numpy` gives), integers [N] or [N, 2], or a
            sequence of str, bytes or int.
        num_rows: N.

    Raises:
        DataError: There are not N keys.
        UnsupportedTypeError: A key is of another type.
    """
    if hasattr(state_keys, "__array__"):
        array = as_array("state_keys", state_keys, "keys")
        words = _array_words(array)
        if words is not None:
            require_length("state_keys", words[:, 0], num_rows)
            return words
        if not array.ndim:
            require_length("state_keys", array, num_rows)
        keys = cast("list[Any]", array.tolist())
    elif isinstance(state_keys, (list, tuple)):
        keys = list(cast("Sequence[Any]", state_keys))
    else:
        raise UnsupportedTypeError(
            f"expected an array or a sequence in `state_keys`, got {type(state_keys).__name__}; "
            "pass one key per row, such as `longstep.state_key.state_key(observation)`"
        )
    words = _sequence_words(keys)
    require_length("state_keys", words[:, 0], num_rows)
    return words


def _array_words(keys: NDArray[Any]) -> NDArray[np.uint64] | None:
    """Words of an array of integers or of voids; None when its items are not whole words."""
    size_bytes = keys.dtype.itemsize
    is_void = keys.dtype.kind == "V" and not keys.dtype.hasobject
    if is_void and keys.ndim == 1 and size_bytes and size_bytes % 8 == 0:
        flat = np.ascontiguousarray(keys)
        return flat.view(np.uint64).reshape(len(flat), size_bytes // 8)
    if keys.dtype.kind in "iu" and keys.ndim in (1, 2) and keys.shape[-1:] != (0,):
        wide = np.ascontiguousarray(keys, np.int64 if keys.dtype.kind == "i" else np.uint64)
        return wide.view(np.uint64).reshape(len(wide), -1)
    return None


def _sequence_words(keys: list[Any]) -> NDArray[np.uint64]:
    """Words of Python keys: their own bytes when each has 16, otherwise a number for each distinct key."""
    types = set(map(type, keys))
    if len(types) > 1 or not types <= {str, bytes, int}:
        expected = next((kind for kind in (str, bytes, int) if kind in types), str)
        row = next(at for at, key in enumerate(keys) if type(key) is not expected)
        raise UnsupportedTypeError(
            "expected only str, only bytes or only int in `state_keys`, got "
            f"{type(keys[row]).__name__} at row {row}; make keys with "
            "`longstep.state_key.state_key(observation)`"
        )
    if types == {bytes} and set(map(len, keys)) == {_KEY_BYTES}:
        return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
    numbers: dict[Any, int] = {}
    codes = [numbers.setdefault(key, len(numbers)) for key in keys]
    return np.array(codes, np.uint64).reshape(-1, 1)
