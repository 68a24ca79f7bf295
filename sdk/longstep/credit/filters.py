"""Which episode groups are worth training on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.credit.episode import episode_returns
from longstep.credit.relative import GroupStatistics
from longstep.credit.rows import Rows

__all__ = ["drop_uniform_groups"]


def drop_uniform_groups(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike,
    *,
    mask: ArrayLike | None = None,
) -> NDArray[np.bool_]:
    """Which rows to keep: those of episode groups whose trajectories do not all have the same return.

    DAPO's dynamic sampling (arXiv 2503.14476, equation 11): a group of equal returns has no gradient; roll out others
    until enough are left. A group of one goes as well. To filter by success instead of return, pass the success of
    each trajectory as the reward of its last step. Linear in the number of rows.

    >>> drop_uniform_groups([1.0, 1.0, 1.0, 0.0], [0, 1, 2, 3], [0, 0, 1, 1]).tolist()
    [False, False, True, True]

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings.
        group_ids: [N] integers or strings; the episode group of each row's trajectory.
        mask: [N] False for padding rows, which are not kept; None counts all rows.

    Returns:
        [N] True where the row stays.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
    """
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    returns_T = episode_returns(rows, rows.rewards)
    statistics = GroupStatistics.of(returns_T, rows.group_of_trajectory, rows.num_groups)
    keep = np.zeros(rows.num_rows, np.bool_)
    keep[slice(None) if rows.kept is None else rows.kept] = ~statistics.uniform[rows.group]
    return keep
