"""Estimators that see whole trajectories: GRPO, RLOO, REINFORCE++."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from longstep.credit.advantages import Advantages, one_term
from longstep.credit.episode import (
    Baseline,
    LoneEpisode,
    Penalty,
    PenaltyScope,
    check_episode_term,
    counted_members,
    episode_returns,
    episode_term,
)
from longstep.credit.relative import GroupStatistics, Normalization
from longstep.credit.returns import check_discount, returns_of
from longstep.credit.rows import Rows
from longstep.errors import ConfigError

__all__ = ["grpo", "reinforce_plus_plus", "rloo"]

_CENTRED = Normalization(normalize="none")


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

    GRPO (arXiv 2402.03300, section 4.1.2): `(R - mean(R)) / std(R)`. With `normalize="none"` it is Dr. GRPO's
    (arXiv 2503.20783). Linear in the number of rows.

    >>> grpo([0.0, 1.0, 0.0], [0, 0, 1], [0, 0, 0], normalize="none").total.tolist()
    [0.5, 0.5, -0.5]

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings.
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
        Advantages [N]; `step` is 0 and `step_groups` None. An empty batch gives empty arrays.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
        ConfigError: An option has no such value.
    """
    check_episode_term(baseline, lone_episode)
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    returns_T = episode_returns(rows, penalty.rewards)
    how = Normalization(normalize=normalize, ddof=ddof, std_floor=std_floor, epsilon=epsilon)
    episode = episode_term(
        rows, returns_T, penalty.row, baseline=baseline, lone_episode=lone_episode, how=how
    )
    return one_term(rows, returns_T, episode, penalty.valid)


def rloo(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike,
    *,
    baseline: Baseline = "trajectory",
    valid: ArrayLike | None = None,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "reward",
    lone_episode: LoneEpisode = "zero",
    mask: ArrayLike | None = None,
) -> Advantages:
    """Each trajectory's return minus the mean return of the others in its episode group.

    RLOO (arXiv 2402.14740, section 2.4): with k members, `(R - mean(R)) * k / (k - 1)`. Linear in the number of rows.

    >>> rloo([3.0, 0.0, 0.0], [0, 1, 2], [0, 0, 0]).total.tolist()
    [3.0, -1.5, -1.5]

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings.
        group_ids: [N] integers or strings; the episode group of each row's trajectory.
        baseline: `trajectory` leaves one trajectory out, `row` one row, as verl-agent does.
        valid: [N] False where the action was invalid; None treats all as valid.
        invalid_action_penalty: Taken off for each invalid action.
        penalty_scope: `reward` or `row`, as in `gigpo`.
        lone_episode: What a group of one gets: `zero`, or `raw`, its return.
        mask: [N] False for padding rows; None counts all rows.

    Returns:
        Advantages [N]; `step` is 0 and `step_groups` None.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
        ConfigError: An option has no such value.
    """
    check_episode_term(baseline, lone_episode)
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    returns_T = episode_returns(rows, penalty.rewards)
    episode = episode_term(
        rows, returns_T, penalty.row, baseline=baseline, lone_episode=lone_episode, how=_CENTRED
    )
    members = counted_members(rows, baseline)[rows.group]
    episode[members >= 2] *= (members / np.maximum(members - 1, 1))[members >= 2]
    return one_term(rows, returns_T, episode, penalty.valid)


def reinforce_plus_plus(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike | None = None,
    *,
    gamma: float = 1.0,
    baseline: Literal["none", "trajectory", "row"] = "none",
    valid: ArrayLike | None = None,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "reward",
    epsilon: float = 1e-6,
    ddof: int = 1,
    std_floor: float = 0.0,
    lone_episode: LoneEpisode = "zero",
    mask: ArrayLike | None = None,
) -> Advantages:
    """Returns standardised over the whole batch, with or without a baseline from the episode group.

    REINFORCE++ (arXiv 2501.03262): without a baseline the discounted return of each step, with one (its
    REINFORCE++-baseline) the trajectory's return minus its group's mean; then minus the mean and divided by the
    standard deviation over all rows of the batch. Linear in the number of rows.

    >>> reinforce_plus_plus([0.0, 2.0], [0, 1], ddof=0, epsilon=0.0).total.tolist()
    [-1.0, 1.0]

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings; rows of one trajectory in order of time.
        group_ids: [N] integers or strings; None only without a baseline, and is one group for the diagnostics.
        gamma: Discount per step of the returns, in [0, 1]; with a baseline episodes are not discounted.
        baseline: `none`, or what the group's mean counts: each `trajectory` once, or each `row`.
        valid: [N] False where the action was invalid; None treats all as valid.
        invalid_action_penalty: Taken off for each invalid action.
        penalty_scope: `reward` or `row`, as in `gigpo`.
        epsilon: Added to the standard deviation of the batch.
        ddof: 1 for the unbiased standard deviation, 0 for the population's.
        std_floor: Smallest standard deviation to divide by.
        lone_episode: With a baseline, what a group of one starts from: `zero`, or `raw`, its return.
        mask: [N] False for padding rows; None counts all rows.

    Returns:
        Advantages [N]; `step` is 0 and `step_groups` None. A batch of one row gives 0.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
        ConfigError: An option has no such value.
    """
    check_episode_term(baseline, lone_episode, optional=True)
    check_discount("gamma", gamma)
    if group_ids is None and baseline != "none":
        raise ConfigError(
            f"expected `group_ids` with `baseline` {baseline!r}, got None; pass the episode group of each row"
        )
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask, grouped=group_ids is not None)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    returns_T = episode_returns(rows, penalty.rewards)
    how = Normalization(normalize="std", ddof=ddof, std_floor=std_floor, epsilon=epsilon)
    if baseline == "none":
        scores = returns_of(rows, penalty.rewards, gamma)
        if penalty.row is not None:
            scores = scores - penalty.row
    else:
        scores = episode_term(
            rows,
            returns_T,
            penalty.row,
            baseline=baseline,
            lone_episode=lone_episode,
            how=_CENTRED,
        )
    whole_batch = np.zeros(len(scores), np.int64)
    episode = GroupStatistics.of(scores, whole_batch, 1).relative(scores, whole_batch, how)
    return one_term(rows, returns_T, episode, penalty.valid)
