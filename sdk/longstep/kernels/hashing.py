"""Integer hash tables over 128-bit keys: which rows have the same key in the same episode group.

Keys are compared whole, so the grouping is exact whatever the keys are, and ids are numbered by first appearance, so
the compiled loop and its numpy twin give the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from longstep.kernels import Kernel, backend

__all__ = ["KERNELS", "group_keys"]

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MIX_2 = 0xC2B2AE3D27D4EB4F  # a large odd prime


def group_keys(
    keys: NDArray[np.uint64], groups: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the distinct pairs (group, key): `ids`, int64[N], and how many rows each has, int64[G].

    Args:
        keys: [N, 2] the two words of each key, C-contiguous. A 16-byte state key is `keys.view(np.uint64)`.
        groups: [N] group within which keys are compared; a negative one leaves the row out, with id -1.

    Returns:
        Ids 0..G-1 in order of first appearance, and the sizes of the G groups.
    """
    if backend() == "numba":
        ids, num_groups = _group_keys_kernel(keys, groups)
    else:
        ids, num_groups = _group_keys_numpy(keys, groups)
    return ids, np.bincount(ids[ids >= 0], minlength=num_groups)


def _group_keys_loop(
    keys: NDArray[np.uint64], groups: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    num_rows = len(groups)
    size = 16
    while size < 2 * num_rows:
        size *= 2
    mask = np.uint64(size - 1)
    first_rows = np.full(
        size, -1, np.int64
    )  # linear probing; each slot holds the first row of a group
    ids = np.full(num_rows, -1, np.int64)
    num_groups = 0
    for row in range(num_rows):
        group = groups[row]
        if group < 0:
            continue
        low, high = keys[row, 0], keys[row, 1]
        mixed = (low ^ (high * np.uint64(_MIX))) + np.uint64(group) * np.uint64(_MIX_2)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_MIX)
        slot = (mixed >> np.uint64(29)) & mask
        while True:
            first = first_rows[slot]
            if first < 0:
                first_rows[slot] = row
                ids[row] = num_groups
                num_groups += 1
                break
            if keys[first, 0] == low and keys[first, 1] == high and groups[first] == group:
                ids[row] = ids[first]
                break
            slot = (slot + np.uint64(1)) & mask
    return ids, num_groups


_group_keys_kernel = Kernel(
    _group_keys_loop, "Tuple((int64[::1], int64))(uint64[:, ::1], int64[::1])"
)


def _group_keys_numpy(
    keys: NDArray[np.uint64], groups: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    kept = np.flatnonzero(groups >= 0)
    keys_M, groups_M = keys[kept], groups[kept].astype(np.uint64)
    mixed = (keys_M[:, 0] ^ (keys_M[:, 1] * np.uint64(_MIX))) + groups_M * np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_MIX)
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    at = first[inverse]
    if not (
        (keys_M == keys_M[at]).all() and (groups_M == groups_M[at]).all()
    ):  # two pairs mixed to one word
        rows = np.column_stack((keys_M, groups_M))
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        inverse = inverse.reshape(-1)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    ids = np.full(len(groups), -1, np.int64)
    ids[kept] = rank[inverse]
    return ids, len(first)


KERNELS = (_group_keys_kernel,)
