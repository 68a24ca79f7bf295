"""GRPO: each trajectory against the mean of its episode group."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.credit.advantages import Advantages
from longstep.credit.diagnostics import diagnose
from longstep.credit.episode import (
    Baseline,
    LoneEpisode,
    Penalty,
    PenaltyScope,
    episode_returns,
    episode_term,
)
from longstep.credit.relative import Normalization
from longstep.credit.rows import Rows

__all__ = ["grpo"]


def grpo(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike,
    *,
    normalize: Literal["none", "std"] = "std",
    baseline: Baseline = "trajectory",
    valid: ArrayLike | None = None,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "reward",
    epsilon: float = 1e-6,
    ddof: int = 1,
    std_floor: float = 0.0,
    lone_episode: LoneEpisode = "zero",
    mask: ArrayLike | None = None,
) -> Advantages:
    """The advantage of each trajectory within its episode group, given to each of its steps.

    GRPO (arXiv 2402.03300, section 4.1.2); with `normalize="none"` it is Dr. GRPO (arXiv 2503.20783). Linear in the
    number of rows.

    >>> grpo([0.0, 1.0, 0.0], [0, 0, 1], [0, 0, 0], normalize="none").total.tolist()
    [0.5, 0.5, -0.5]

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings; rows of one trajectory in order of time.
        group_ids: [N] integers or strings; the episode group of each row's trajectory.
        normalize: `std` divides by the standard deviation of the group, `none` does not.
        baseline: `trajectory` counts each trajectory once in the group's mean, `row` once for each of its rows.
        valid: [N] False where the action was invalid; None treats all as valid.
        invalid_action_penalty: Taken off for each invalid action.
        penalty_scope: `reward` makes it part of the return, `row` takes it off that row's score alone.
        epsilon: Added to the standard deviation.
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        std_floor: Smallest standard deviation to divide by.
        lone_episode: What a group of one gets: `zero`, or `raw`, its return.
        mask: [N] False for padding rows, which count nowhere and get 0; None counts all rows.

    Returns:
        Advantages; `step` is 0 and `step_groups` None. An empty batch gives empty arrays.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
        ConfigError: An option has no such value.
    """
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    returns_T = episode_returns(rows, penalty.rewards)
    how = Normalization(normalize=normalize, ddof=ddof, std_floor=std_floor, epsilon=epsilon)
    episode = episode_term(
        rows, returns_T, penalty.row, baseline=baseline, lone_episode=lone_episode, how=how
    )
    return episode_only(rows, returns_T, episode, penalty.valid)


def episode_only(
    rows: Rows,
    returns_T: NDArray[np.float64],
    episode: NDArray[np.float64],
    valid: NDArray[np.bool_] | None,
) -> Advantages:
    """The result of an estimator without a step term, from its [M] episode term."""
    diagnostics = diagnose(
        rows, returns_T, episode=episode, weighted_step=None, step_groups=None, valid=valid
    )
    expanded = rows.expand(episode)
    return Advantages(
        total=expanded,
        episode=expanded,
        step=np.zeros(rows.num_rows, np.float32),
        step_groups=None,
        diagnostics=diagnostics,
    )
