"""Sums and recurrences over segments of rows: returns and group statistics.

Rows of one segment stand together (`offsets`) or carry its number (`ids`). Everything accumulates in float64, row by
row in ascending order, so a numpy function and its compiled twin give the same bits.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from longstep.kernels import Kernel, backend

__all__ = [
    "KERNELS",
    "centre_and_scale",
    "discounted_returns",
    "group_statistics",
    "group_sums",
]

# Below this mean number of rows per time step a loop over Python floats beats one numpy call per time step.
_MIN_ROWS_PER_CALL = 8


def discounted_returns(
    rewards: NDArray[np.float64], offsets: NDArray[np.int64], gamma: float
) -> NDArray[np.float64]:
    """`out[i] = rewards[i] + gamma * out[i + 1]` within each segment.

    Args:
        rewards: [N] segment by segment.
        offsets: [T + 1] start of each segment, ascending, from 0 to N.
        gamma: Discount.
    """
    if backend() == "numba":
        return _discounted_returns_kernel(rewards, offsets, gamma)
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    if len(rewards) < _MIN_ROWS_PER_CALL * longest:
        return _discounted_returns_rows(rewards, offsets, gamma)
    by_length = np.argsort(-lengths, kind="stable")
    starts = offsets[:-1][by_length]
    # segments longer than t are the first `num_active[t]` of `starts`
    num_active = len(lengths) - np.cumsum(np.bincount(lengths, minlength=longest + 1))
    carry = np.zeros(len(lengths))
    returns = np.empty_like(rewards)
    for t in range(longest - 1, -1, -1):
        active = num_active[t]
        at = starts[:active] + t
        carry[:active] = rewards[at] + gamma * carry[:active]
        returns[at] = carry[:active]
    return returns


def _discounted_returns_rows(
    rewards: NDArray[np.float64], offsets: NDArray[np.int64], gamma: float
) -> NDArray[np.float64]:
    values: list[float] = rewards.tolist()
    bounds: list[int] = offsets.tolist()
    for start, stop in itertools.pairwise(bounds):
        carry = 0.0
        for at in range(stop - 1, start - 1, -1):
            carry = values[at] + gamma * carry
            values[at] = carry
    return np.array(values, np.float64)


def _discounted_returns_loop(
    rewards: NDArray[np.float64], offsets: NDArray[np.int64], gamma: float
) -> NDArray[np.float64]:
    returns = np.empty(len(rewards), np.float64)
    for segment in range(len(offsets) - 1):
        carry = 0.0
        for at in range(offsets[segment + 1] - 1, offsets[segment] - 1, -1):
            carry = rewards[at] + gamma * carry
            returns[at] = carry
    return returns


def group_sums(
    values: NDArray[np.float64], ids: NDArray[np.int64], num_groups: int
) -> NDArray[np.float64]:
    """[G] sum of the values of each group.

    Args:
        values: [N]
        ids: [N] group of each value, 0..G-1.
        num_groups: G.
    """
    return np.bincount(ids, values, minlength=num_groups).astype(np.float64, copy=False)


def group_statistics(
    values: NDArray[np.float64], ids: NDArray[np.int64], num_groups: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Count, mean and sum of squared deviations of each group.

    The mean is taken relative to the group's first value, so equal values give exactly that mean and a sum of squares
    of exactly 0.

    Args:
        values: [N] finite numbers.
        ids: [N] group of each value, 0..G-1; a negative id belongs to no group.
        num_groups: G.

    Returns:
        counts [G], means [G] and sums of squares [G]; 0 where a group has no member.
    """
    if backend() == "numba":
        return _group_statistics_kernel(values, ids, num_groups)
    in_group = ids >= 0
    if not in_group.all():
        values, ids = values[in_group], ids[in_group]
    counts = np.bincount(ids, minlength=num_groups)
    pivots = np.zeros(num_groups)
    pivots[ids[::-1]] = values[::-1]  # of repeated indices the last assignment stays: the first row
    shifts = group_sums(values - pivots[ids], ids, num_groups)
    means = pivots + shifts / np.maximum(counts, 1)
    squares = group_sums(np.square(values - means[ids]), ids, num_groups)
    return counts, means, squares


def _group_statistics_loop(
    values: NDArray[np.float64], ids: NDArray[np.int64], num_groups: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    counts = np.zeros(num_groups, np.int64)
    pivots = np.zeros(num_groups, np.float64)
    shifts = np.zeros(num_groups, np.float64)
    for at in range(len(ids)):
        group = ids[at]
        if group >= 0:
            if counts[group] == 0:
                pivots[group] = values[at]
            counts[group] += 1
            shifts[group] += values[at] - pivots[group]
    means = np.zeros(num_groups, np.float64)
    for group in range(num_groups):
        means[group] = pivots[group] + shifts[group] / max(counts[group], 1)
    squares = np.zeros(num_groups, np.float64)
    for at in range(len(ids)):
        group = ids[at]
        if group >= 0:
            deviation = values[at] - means[group]
            squares[group] += deviation * deviation
    return counts, means, squares


def centre_and_scale(
    values: NDArray[np.float64],
    ids: NDArray[np.int64],
    centres: NDArray[np.float64],
    scales: NDArray[np.float64],
) -> NDArray[np.float64]:
    """`(values - centres[ids]) * scales[ids]`, and 0 where the id is negative.

    Args:
        values: [N]
        ids: [N] group of each value, 0..G-1, or negative.
        centres: [G]
        scales: [G]
    """
    if not len(centres):
        return np.zeros(len(values))
    if backend() == "numba":
        return _centre_and_scale_kernel(values, ids, centres, scales)
    result = (values - centres[ids]) * scales[ids]
    result[ids < 0] = 0.0
    return result


def _centre_and_scale_loop(
    values: NDArray[np.float64],
    ids: NDArray[np.int64],
    centres: NDArray[np.float64],
    scales: NDArray[np.float64],
) -> NDArray[np.float64]:
    result = np.zeros(len(values), np.float64)
    for at in range(len(values)):
        group = ids[at]
        if group >= 0:
            result[at] = (values[at] - centres[group]) * scales[group]
    return result


_discounted_returns_kernel = Kernel(
    _discounted_returns_loop, "float64[::1](float64[::1], int64[::1], float64)"
)
_group_statistics_kernel = Kernel(
    _group_statistics_loop,
    "Tuple((int64[::1], float64[::1], float64[::1]))(float64[::1], int64[::1], int64)",
)
_centre_and_scale_kernel = Kernel(
    _centre_and_scale_loop,
    "float64[::1](float64[::1], int64[::1], float64[::1], float64[::1])",
)

KERNELS = (_discounted_returns_kernel, _group_statistics_kernel, _centre_and_scale_kernel)
"""What `longstep.kernels.warm_up` compiles."""
