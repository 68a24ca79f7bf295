"""Equal rows of integers, numbered in the order in which they first appear."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["KERNELS", "first_appearance_ids"]

KERNELS = ()

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


def first_appearance_ids(words: NDArray[np.uint64]) -> tuple[NDArray[np.int64], int]:
    """Ids of rows such that two rows have one id exactly when all their words are equal.

    Args:
        words: [N, W] any 64-bit words.

    Returns:
        ids [N], numbered 0..G-1 by the first row that has each; and G.
    """
    num_rows = len(words)
    if not num_rows:
        return np.zeros(0, np.int64), 0
    hashes = _mix(words)
    order = np.argsort(hashes)
    is_start = np.empty(num_rows, np.bool_)
    is_start[0] = True
    np.not_equal(hashes[order[1:]], hashes[order[:-1]], out=is_start[1:])
    same_hash = ~is_start[1:]
    differs = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    if (same_hash & differs).any():  # two rows of words share a 64-bit hash: sort by the words
        order = np.lexsort(words.T)
        is_start[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    starts = np.flatnonzero(is_start)
    first_G = np.minimum.reduceat(order, starts)
    rank_G = np.empty(len(starts), np.int64)
    rank_G[np.argsort(first_G)] = np.arange(len(starts))
    ids = np.empty(num_rows, np.int64)
    ids[order] = rank_G[np.cumsum(is_start) - 1]
    return ids, len(starts)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """[N] one well-mixed word for each row."""
    mixed = np.zeros(len(words), np.uint64)
    for column in range(words.shape[1]):
        mixed ^= words[:, column]
        mixed *= np.uint64(_MULTIPLIERS[column % len(_MULTIPLIERS)])
        mixed ^= mixed >> np.uint64(32)
    return mixed
