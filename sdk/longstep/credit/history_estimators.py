"""HGPO: steps compared with those that share a state, and more so with those that share its history."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.arguments import check_count, check_flag, check_number
from longstep.credit.advantages import Advantages, two_terms
from longstep.credit.episode import (
    Baseline,
    LoneEpisode,
    Penalty,
    PenaltyScope,
    check_episode_term,
    episode_returns,
)
from longstep.credit.episode import episode_term as whole_episode_term
from longstep.credit.groups import StepGroups, group_equal, history_codes
from longstep.credit.keys import key_words
from longstep.credit.relative import ROUNDING, Normalization, check_ddof
from longstep.credit.returns import returns_of
from longstep.credit.rows import Rows
from longstep.credit.step import step_term
from longstep.errors import ConfigError

__all__ = ["hgpo"]


def hgpo(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike,
    state_keys: Any,
    *,
    gamma: float = 0.95,
    normalize: Literal["none", "std"] = "std",
    history_length: int = 2,
    length_weight_alpha: float = 1.0,
    episode_term: bool = False,
    baseline: Baseline = "trajectory",
    valid: ArrayLike | None = None,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "reward",
    inner_group_size: int = 2,
    epsilon: float = 1e-6,
    ddof: int = 0,
    episode_ddof: int = 1,
    std_floor: float = 0.0,
    lone_episode: LoneEpisode = "zero",
    mask: ArrayLike | None = None,
) -> Advantages:
    """The advantage of each step, averaged over step groups that share ever longer histories.

    HGPO (arXiv 2602.22817): for k = 1 .. `history_length` + 1 a step is compared with the steps of its episode group
    whose last k states are equal. The advantages that are not 0 are averaged with weights `(k + 1) ** alpha`; the
    episode term, if wanted, takes part as k = 0. Steps with fewer than k states behind them have no group of length k.
    Linear in rows times history, but for one sort for each length when the compiled kernels are not in use.

    Args:
        rewards: [N] reward of each step.
        trajectory_ids: [N] integers or strings; rows of one trajectory in order of time.
        group_ids: [N] integers or strings; the episode group of each row's trajectory.
        state_keys: [N] the state each action was chosen in, as in `gigpo`.
        gamma: Discount per step of the returns that are compared, in [0, 1].
        normalize: `none` subtracts the mean, `std` also divides by the standard deviation.
        history_length: Number of earlier states that the longest comparison asks for.
        length_weight_alpha: Exponent of the weights; 0 weighs all lengths equally.
        episode_term: True lets the episode's advantage take part, as k = 0.
        baseline: What the episode group's mean counts: each `trajectory` once, or each `row`.
        valid: [N] False where the action was invalid; None treats all as valid.
        invalid_action_penalty: Taken off for each invalid action.
        penalty_scope: `reward` or `row`, as in `gigpo`.
        inner_group_size: Smallest number of members of a step group that is compared, at least 2.
        epsilon: Added to the standard deviation and to the sum of the weights.
        ddof: In step groups, 0 for the population's standard deviation (as published), 1 for the unbiased one.
        episode_ddof: The same in the episode term, where the published code takes the unbiased one.
        std_floor: Smallest standard deviation to divide by.
        lone_episode: Episode term of a group of one: `zero`, or `raw`, its return.
        mask: [N] False for padding rows, which count nowhere and get 0; None counts all rows.

    Returns:
        Advantages [N]: `episode` and `step` are their weighted shares and add up to `total`; `step_groups` are the
        groups of equal states.

    Raises:
        DataError: Lengths differ, a reward is not finite, a trajectory is in two groups.
        UnsupportedTypeError: A state key is of a type without a fixed identity.
        ConfigError: An option has no such value.
    """
    check_episode_term(baseline, lone_episode)
    check_count("history_length", history_length, 0)
    check_flag("episode_term", episode_term)
    check_ddof("episode_ddof", episode_ddof)
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    how = Normalization(normalize=normalize, ddof=ddof, std_floor=std_floor, epsilon=epsilon)
    episode_how = dataclasses.replace(how, ddof=episode_ddof)
    returns_T = episode_returns(rows, penalty.rewards)
    returns = returns_of(rows, penalty.rewards, gamma)
    if penalty.row is not None:
        returns = returns - penalty.row
    words = rows.keep(key_words(state_keys, rows.num_rows))
    episode, step = np.zeros(len(returns)), np.zeros(len(returns))
    weights = np.zeros(len(returns))
    if episode_term:
        episode = whole_episode_term(
            rows,
            returns_T,
            penalty.row,
            baseline=baseline,
            lone_episode=lone_episode,
            how=episode_how,
        )
        weights += episode != 0.0
    suffix_groups = _suffix_groups(rows, words, min(history_length, rows.longest))
    length_weights = _length_weights(len(suffix_groups), length_weight_alpha)
    for groups, weight in zip(suffix_groups, length_weights, strict=True):
        term = step_term(rows, returns, groups, how=how, min_size=inner_group_size)
        step += weight * term
        weights += weight * (np.abs(term) > ROUNDING * np.abs(returns))
    divisor = np.where(weights > 0.0, weights + float(epsilon), 1.0)
    return two_terms(
        rows, returns_T, episode / divisor, step / divisor, 1.0, suffix_groups[0], penalty.valid
    )


def _length_weights(num_lengths: int, alpha: float) -> list[float]:
    """Weights `(k + 1) ** alpha` of the lengths k = 1, 2 ..."""
    check_number("length_weight_alpha", alpha)
    with np.errstate(over="ignore"):
        weights = np.arange(2.0, num_lengths + 2.0) ** float(alpha)
    if not np.isfinite(weights.sum()):
        raise ConfigError(
            f"expected `length_weight_alpha` with finite weights, got {alpha}; 1.0 grows with the length"
        )
    return weights.tolist()


def _suffix_groups(rows: Rows, words: NDArray[np.uint64], history_length: int) -> list[StepGroups]:
    """Groups of rows whose last 1, 2 .. `history_length` + 1 states are equal."""
    steps = rows.step
    return [
        group_equal(codes.view(np.uint64)[:, None], np.where(steps >= num_before, rows.group, -1))
        for num_before, codes in enumerate(
            itertools.islice(history_codes(rows, words), history_length + 1)
        )
    ]
