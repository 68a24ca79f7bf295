"""The episode term: whole trajectories compared within their episode group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.arguments import check_choice, check_number
from longstep.credit.relative import GroupStatistics, Normalization
from longstep.credit.rows import Rows
from longstep.errors import ConfigError
from longstep.kernels import segments

__all__ = ["Penalty", "check_episode_term", "counted_members", "episode_returns", "episode_term"]

Baseline = Literal["trajectory", "row"]
LoneEpisode = Literal["zero", "raw"]
PenaltyScope = Literal["reward", "row"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Penalty:
    """What invalid actions cost, and where it is taken off."""

    valid: NDArray[np.bool_] | None
    """[M] False where the action was invalid; None when the caller does not know."""
    rewards: NDArray[np.float64]
    """[M] rewards, with the penalty when it is part of them."""
    row: NDArray[np.float64] | None
    """[M] what to take off each row's own scores after all sums; None when there is nothing to."""

    @classmethod
    def read(
        cls,
        rows: Rows,
        valid: ArrayLike | None,
        invalid_action_penalty: float,
        penalty_scope: PenaltyScope,
    ) -> Penalty:
        """Apply the penalty to the rewards, or keep it for the rows."""
        check_choice("penalty_scope", penalty_scope, ("reward", "row"))
        check_number("invalid_action_penalty", invalid_action_penalty)
        if not 0.0 <= invalid_action_penalty < np.inf:
            raise ConfigError(
                f"expected `invalid_action_penalty` of 0 or more, got {invalid_action_penalty}; "
                "it is subtracted"
            )
        if valid is None:
            if invalid_action_penalty:
                raise ConfigError(
                    "expected `valid` with an `invalid_action_penalty`, got None; "
                    "pass False for the rows with an invalid action"
                )
            return cls(valid=None, rewards=rows.rewards, row=None)
        valid_M = rows.bools("valid", valid)
        cost = np.where(valid_M, 0.0, float(invalid_action_penalty))
        if penalty_scope == "reward":
            return cls(valid=valid_M, rewards=rows.rewards - cost, row=None)
        return cls(valid=valid_M, rewards=rows.rewards, row=cost)


def check_episode_term(baseline: str, lone_episode: str, *, optional: bool = False) -> None:
    """Raise a `ConfigError` for an unknown baseline or lone episode; where `optional`, a baseline of `none` is known."""
    baselines = ("none", "trajectory", "row") if optional else ("trajectory", "row")
    check_choice("baseline", baseline, baselines)
    check_choice("lone_episode", lone_episode, ("zero", "raw"))


def episode_returns(rows: Rows, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """[T] undiscounted sum of the rewards of each trajectory."""
    return segments.group_sums(rewards, rows.trajectory, rows.num_trajectories)


def counted_members(rows: Rows, baseline: Baseline) -> NDArray[np.int64]:
    """[E] how many members each episode group counts: its trajectories, or its rows."""
    if baseline == "row":
        return np.bincount(rows.group, minlength=rows.num_groups)
    real = rows.group_of_trajectory[rows.group_of_trajectory >= 0]
    return np.bincount(real, minlength=rows.num_groups)


def episode_term(
    rows: Rows,
    returns_T: NDArray[np.float64],
    row_penalty: NDArray[np.float64] | None,
    *,
    baseline: Baseline,
    lone_episode: LoneEpisode,
    how: Normalization,
) -> NDArray[np.float64]:
    """[M] each row's return relative to its episode group.

    Args:
        rows: The checked rows.
        returns_T: [T] return of each trajectory.
        row_penalty: [M] what is taken off each row's own return; None for nothing.
        baseline: `trajectory` counts each trajectory once (GiGPO equation 3), without row penalties; `row` counts it
            once for each of its rows, with them, as verl-agent does.
        lone_episode: What a group of one counted member gets: `zero`, or `raw`, its return.
        how: The divisor.
    """
    scores = returns_T[rows.trajectory]
    if row_penalty is not None:
        scores = scores - row_penalty
    if baseline == "row":
        statistics = GroupStatistics.of(scores, rows.group, rows.num_groups)
    else:
        statistics = GroupStatistics.of(returns_T, rows.group_of_trajectory, rows.num_groups)
    term = statistics.relative(scores, rows.group, how)
    if lone_episode == "raw":
        lone = statistics.counts[rows.group] == 1
        term[lone] = scores[lone]
    return term
