"""Sums of rewards along trajectories."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.arguments import check_number
from longstep.credit.rows import Rows
from longstep.errors import ConfigError
from longstep.kernels import segments

__all__ = ["discounted_returns"]


def discounted_returns(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    gamma: float,
    *,
    mask: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """The discounted sum of what follows each step, its own reward included.

    GiGPO (arXiv 2505.10978), equation 5: `R_t = sum over k >= t of gamma^(k - t) r_k`. Linear in the number of rows.

    >>> discounted_returns([0.0, 0.0, 1.0, 5.0], ["a", "a", "a", "b"], 0.5).tolist()
    [0.25, 0.5, 1.0, 5.0]

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings; rows of one trajectory in order of time.
        gamma: Discount per step, in [0, 1].
        mask: [N] False for padding rows, which get 0; None counts all rows.

    Returns:
        [N] returns, in the order of the rows.

    Raises:
        DataError: Lengths differ or a reward is not finite.
        ConfigError: `gamma` is outside [0, 1].
    """
    rows = Rows.read(rewards, trajectory_ids, None, mask, grouped=False)
    return rows.expand(returns_of(rows, rows.rewards, gamma))


def returns_of(rows: Rows, rewards: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """[M] discounted returns of checked rows under the given [M] rewards."""
    check_discount("gamma", gamma)
    in_time = rows.in_time_order(rewards)
    return rows.in_row_order(segments.discounted_returns(in_time, rows.offsets, float(gamma)))


def check_discount(name: str, value: float) -> None:
    """Raise a `ConfigError` unless a discount is a number in [0, 1]."""
    check_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"expected `{name}` in [0, 1], got {value}; it is a factor per step")
