"""Columns of a batch as arrays: one value per row, of the right kind, or an error that names argument and row.

numpy turns nearly anything into an array: None into NaN, `"1.5"` into a number, `["a", nan]` into two texts. What was
meant is not known then, so each of these is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.errors import DataError

__all__ = [
    "as_array",
    "bool_column",
    "float_column",
    "id_codes",
    "require_finite",
    "require_length",
]


def float_column(name: str, values: ArrayLike, num_rows: int | None = None) -> NDArray[np.float64]:
    """[N] float64 of numbers or booleans, or a `DataError` that names the argument."""
    column = as_array(name, values, "numbers")
    require_length(name, column, num_rows)
    if column.size and column.dtype.kind not in "biuf":
        _require_each(name, values, column, _is_real, "numbers", "pass one per row")
    try:
        return np.ascontiguousarray(column, np.float64)
    except OverflowError as error:
        raise DataError(
            f"expected numbers in `{name}` that a float64 holds, got {error}"
        ) from error


def bool_column(name: str, values: ArrayLike, num_rows: int) -> NDArray[np.bool_]:
    """[N] booleans, or a `DataError` that names the argument; the numbers 0 and 1 serve as well."""
    column = as_array(name, values, "True or False per row")
    require_length(name, column, num_rows)
    if column.dtype.kind == "b":
        return column
    if column.size and (column.dtype.kind not in "iuf" or not np.isin(column, (0, 1)).all()):
        _require_each(
            name, values, column, _is_truth, "True or False per row", "pass a boolean array"
        )
    return column.astype(np.bool_)


def id_codes(
    name: str, ids: ArrayLike | None, num_rows: int, kept: NDArray[np.intp] | None = None
) -> tuple[NDArray[np.int64], int]:
    """Ids as small integers, and how many codes there may be.

    Small non-negative integers stay as they are. Otherwise an array is numbered in sorted order, and a list that holds
    anything but int in order of appearance, where `1` and `"1"` are two ids.

    Args:
        name: The argument's name, for errors.
        ids: [N] integers or strings.
        num_rows: N.
        kept: [M] rows to keep; None keeps all.
    """
    column = as_array(name, ids, "integers or strings")
    require_length(name, column, num_rows)
    if not column.size:
        return np.zeros(0, np.int64), 0
    is_listed = isinstance(ids, list | tuple)
    items = _items(ids, column) if is_listed or column.dtype.kind not in "iuUS" else []
    if items and not (column.dtype.kind in "iu" and set(map(type, items)) <= {int}):
        _require_each(name, items, column, _is_id, "integers or strings", "number them")
        numbers: dict[Any, int] = {}
        taken = items if kept is None else [items[at] for at in kept.tolist()]
        codes = [numbers.setdefault(item, len(numbers)) for item in taken]
        return np.array(codes, np.int64), len(numbers)
    column = column if kept is None else column[kept]
    if not column.size:
        return np.zeros(0, np.int64), 0
    if column.dtype.kind in "iu" and column.min() >= 0 and column.max() <= 2 * column.size:
        return np.ascontiguousarray(column, np.int64), int(column.max()) + 1
    unique, inverse = np.unique(column, return_inverse=True)
    return inverse.astype(np.int64, copy=False), len(unique)


def as_array(name: str, values: Any, expected: str) -> NDArray[Any]:
    """The array that numpy makes of an argument, of any kind and shape, or a `DataError` that names it."""
    if values is None:
        raise DataError(f"expected {expected} in `{name}`, got None; pass one value per row")
    try:
        return np.asarray(values)
    except (
        Exception
    ) as error:  # rows of unequal lengths, a tensor on a device: anything may be raised
        raise DataError(
            f"expected {expected} in `{name}`, got a {type(values).__name__} that is no array: {error}; "
            "pass one value per row"
        ) from error


def require_finite(
    name: str, column: NDArray[np.float64], kept: NDArray[np.intp] | None = None
) -> None:
    """Raise a `DataError` that names the first row with NaN or an infinity."""
    finite = np.isfinite(column)
    if not finite.all():
        at = int(np.argmin(finite))
        row = at if kept is None else int(kept[at])
        raise DataError(
            f"expected finite numbers in `{name}`, got {column[at]} at row {row}; "
            "leave that trajectory out or repair its environment"
        )


def require_length(name: str, column: NDArray[Any], num_rows: int | None) -> None:
    """Raise a `DataError` unless the array has one dimension, of `num_rows` unless that is None."""
    if column.ndim != 1:
        got = f"an array of shape {column.shape}" if column.ndim else f"{column[()]!r:.60}"
        raise DataError(
            f"expected one value per row in `{name}`, got {got}; pass one dimension, such as a list"
        )
    if num_rows is not None and len(column) != num_rows:
        at = min(len(column), num_rows)
        raise DataError(
            f"expected {num_rows} rows in `{name}`, as in the arguments before it, got {len(column)}; "
            f"the first row without a partner is row {at}"
        )


def _require_each(
    name: str,
    values: Any,
    column: NDArray[Any],
    is_good: Callable[[Any], bool],
    expected: str,
    remedy: str,
) -> None:
    """Raise a `DataError` that names the first row whose value is none of the expected."""
    for row, value in enumerate(_items(values, column)):
        if not is_good(value):
            raise DataError(
                f"expected {expected} in `{name}`, got {value!r:.60} at row {row}; {remedy}"
            )


def _items(values: Any, column: NDArray[Any]) -> list[Any]:
    """The values as they were given, before numpy made them one type."""
    if isinstance(values, list | tuple):
        return list(cast("Iterable[Any]", values))
    return cast("list[Any]", column.tolist())


def _is_real(value: Any) -> bool:
    return isinstance(value, Real | np.bool_)


def _is_truth(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) and value in (0, 1)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer | str | bytes) and not isinstance(value, bool)
