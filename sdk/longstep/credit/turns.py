"""Advantages of turns under a learned value function: GAE across the steps of a trajectory."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.credit.columns import float_column, require_finite
from longstep.credit.returns import check_discount
from longstep.credit.rows import Rows
from longstep.errors import DataError
from longstep.kernels import segments

__all__ = ["turn_gae"]


def turn_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    trajectory_ids: ArrayLike,
    *,
    gamma: float,
    lam: float,
    terminated: ArrayLike,
    bootstrap_values: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Generalised advantages of each step, and the returns that the value function is fitted to.

    GAE (arXiv 1506.02438, equation 16) over steps, not tokens: `delta_t = r_t + gamma V_(t+1) - V_t` and
    `A_t = delta_t + gamma lam A_(t+1)`; returns are `A + V`. After the last step comes 0 when it terminated, else its
    bootstrap value. Linear in the number of rows.

    >>> advantages, returns = turn_gae(
    ...     [0.0, 1.0], [0.5, 0.5], [0, 0], gamma=1.0, lam=1.0, terminated=[False, True]
    ... )
    >>> advantages.tolist(), returns.tolist()
    ([0.5, 0.5], [1.0, 1.0])

    Args:
        rewards: [N] reward of each step.
        values: [N] estimated value of the state before each step.
        trajectory_ids: [N] integers or strings; rows of one trajectory in order of time.
        gamma: Discount per step, in [0, 1].
        lam: Decay of the eligibility, in [0, 1].
        terminated: [N] True where the step reached a terminal state, which only a last step can.
        bootstrap_values: [N] value of the state after each step, read at the last step of a trajectory that did not
            terminate (truncated, time limit); or one value for each trajectory, in order of first appearance. None
            when all trajectories terminated.
        mask: [N] False for padding rows, which get 0; None counts all rows.

    Returns:
        Advantages [N] and returns [N].

    Raises:
        DataError: Lengths differ, a number is not finite, a trajectory goes on after it terminated, or one that did
            not terminate has no bootstrap value.
        ConfigError: `gamma` or `lam` is outside [0, 1].
    """
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    gamma, lam = float(gamma), float(lam)
    rows = Rows.read(rewards, trajectory_ids, None, mask, grouped=False)
    values_M = rows.in_time_order(rows.floats("values", values))
    terminated_M = rows.in_time_order(rows.bools("terminated", terminated))
    last = rows.offsets[1:][np.diff(rows.offsets) > 0] - 1
    _require_nothing_after(rows, terminated_M, last)
    next_values = np.empty_like(values_M)
    next_values[:-1] = values_M[1:]
    next_values[last] = _values_at_the_end(rows, terminated_M[last], last, bootstrap_values)
    deltas = rows.in_time_order(rows.rewards) + gamma * next_values - values_M
    advantages = segments.discounted_returns(deltas, rows.offsets, gamma * lam)
    return (
        rows.expand(rows.in_row_order(advantages)),
        rows.expand(rows.in_row_order(advantages + values_M)),
    )


def _row_at(rows: Rows, at: int) -> int:
    """The caller's number of the row at a position in time order."""
    return rows.caller_row(at if rows.order is None else int(rows.order[at]))


def _require_nothing_after(
    rows: Rows, terminated: NDArray[np.bool_], last: NDArray[np.int64]
) -> None:
    early = terminated.copy()
    early[last] = False
    if early.any():
        at = int(np.argmax(early))
        raise DataError(
            f"expected `terminated` at the last step of a trajectory only, got True at row {_row_at(rows, at)}, which "
            f"row {_row_at(rows, at + 1)} follows; give each trajectory its own id"
        )


def _values_at_the_end(
    rows: Rows,
    terminated: NDArray[np.bool_],
    last: NDArray[np.int64],
    bootstrap_values: ArrayLike | None,
) -> NDArray[np.float64]:
    """[T'] value after the last step of each trajectory, in the order of `last`; 0 where it terminated."""
    if bootstrap_values is None:
        if not terminated.all():
            row = _row_at(rows, int(last[np.argmin(terminated)]))
            raise DataError(
                f"expected `bootstrap_values`, since the trajectory that ends at row {row} did not terminate, got "
                "None; pass the value of the state after it, or set `terminated` there"
            )
        return np.zeros(len(last))
    bootstrap = float_column("bootstrap_values", bootstrap_values)
    row_of_last = last if rows.order is None else rows.order[last]
    if len(bootstrap) == rows.num_rows:
        ends = rows.keep(bootstrap)[row_of_last]
    elif len(bootstrap) == len(last):
        starts = np.concatenate(([0], last[:-1] + 1))
        first_rows = starts if rows.order is None else rows.order[starts]
        ends = np.empty(len(last))
        ends[np.argsort(first_rows)] = bootstrap
    else:
        raise DataError(
            f"expected {rows.num_rows} `bootstrap_values`, one per row, or {len(last)}, one per trajectory, "
            f"got {len(bootstrap)}"
        )
    ends = np.where(terminated, 0.0, ends)
    require_finite("bootstrap_values", ends)
    return ends
