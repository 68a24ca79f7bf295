"""Equal rows of integers within a class, numbered in the order in which they first appear.

The numpy twin sorts a 64-bit hash and checks it against the words; the compiled one fills a hash table. Both compare
whole rows, so no collision can join two of them, and both give the same ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from longstep.kernels import Kernel, backend

__all__ = ["KERNELS", "first_appearance_groups"]

_ODD_1 = np.uint64(0x9E3779B97F4A7C15)
_ODD_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(32)


def first_appearance_groups(
    words: NDArray[np.uint64], classes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of rows and sizes of their groups: two rows have one id exactly when their class and all their words are equal.

    Args:
        words: [N, W] any 64-bit words.
        classes: [N] integers; a row of a negative class gets id -1.

    Returns:
        ids [N], numbered 0..G-1 by the first row that has each; and the number of rows of each [G].
    """
    num_rows = len(words)
    if backend() == "numba" and num_rows < 2**30:
        return _first_appearance_kernel(np.ascontiguousarray(words), classes)
    counted = classes >= 0
    if counted.all():
        ids = _ids_by_sorting(words, classes)
        return ids, np.bincount(ids)
    ids = np.full(num_rows, -1, np.int64)
    ids[counted] = _ids_by_sorting(words[counted], classes[counted])
    return ids, np.bincount(ids[counted])


def _ids_by_sorting(words: NDArray[np.uint64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    num_rows = len(words)
    if not num_rows:
        return np.zeros(0, np.int64)
    columns = [classes.view(np.uint64), *(np.ascontiguousarray(column) for column in words.T)]
    hashes = _mix(columns)
    order = np.argsort(hashes)
    is_start = _changes(hashes[order])
    first_G = np.minimum.reduceat(order, np.flatnonzero(is_start))
    segment = np.empty(num_rows, np.int64)
    segment[order] = np.cumsum(is_start) - 1
    representative = first_G[segment]
    if any((column != column[representative]).any() for column in columns):
        order = np.lexsort(columns)  # two different rows share a 64-bit hash
        is_start = np.logical_or.reduce([_changes(column[order]) for column in columns])
        first_G = np.minimum.reduceat(order, np.flatnonzero(is_start))
        segment[order] = np.cumsum(is_start) - 1
        representative = first_G[segment]
    is_first = representative == np.arange(num_rows)
    return (np.cumsum(is_first) - 1)[representative]


def _changes(ordered: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """[N] True at the first value and wherever a value differs from the one before it."""
    changes = np.empty(len(ordered), np.bool_)
    changes[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=changes[1:])
    return changes


def _mix(columns: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """[N] one well-mixed word for each row."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed ^= column
        mixed *= _ODD_1
        mixed ^= mixed >> _SHIFT
        mixed *= _ODD_2
        mixed ^= mixed >> _SHIFT
    return mixed


def _first_appearance_loop(
    words: NDArray[np.uint64], classes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    num_rows, num_words = words.shape
    num_slots = 16
    while num_slots < 2 * num_rows:
        num_slots *= 2
    first_row = np.full(num_slots, -1, np.int32)
    ids = np.full(num_rows, -1, np.int64)
    sizes = np.empty(num_rows, np.int64)
    num_groups = 0
    last_slot = np.uint64(num_slots - 1)
    for row in range(num_rows):
        if classes[row] < 0:
            continue
        mixed = np.uint64(classes[row]) * _ODD_1
        mixed ^= mixed >> _SHIFT
        for word in range(num_words):
            mixed = (mixed ^ words[row, word]) * _ODD_2
            mixed ^= mixed >> _SHIFT
        slot = mixed & last_slot
        while True:
            other = first_row[slot]
            if other < 0:
                first_row[slot] = row
                ids[row] = num_groups
                sizes[num_groups] = 1
                num_groups += 1
                break
            same = classes[other] == classes[row]
            for word in range(num_words):
                same = same and words[other, word] == words[row, word]
            if same:
                ids[row] = ids[other]
                sizes[ids[other]] += 1
                break
            slot = (slot + np.uint64(1)) & last_slot
    return ids, sizes[:num_groups].copy()


_first_appearance_kernel = Kernel(
    _first_appearance_loop, "Tuple((int64[::1], int64[::1]))(uint64[:, ::1], int64[::1])"
)

KERNELS = (_first_appearance_kernel,)
"""What `longstep.kernels.warm_up` compiles."""
