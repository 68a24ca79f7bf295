"""GiGPO: the relative return of the episode, plus that of the step among steps in the same state."""

from __future__ import annotations

from typing import Any, Literal

from numpy.typing import ArrayLike

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
from longstep.credit.groups import StepGroups, group_codes
from longstep.credit.keys import key_words
from longstep.credit.relative import GroupStatistics, Normalization
from longstep.credit.returns import returns_of
from longstep.credit.rows import Rows
from longstep.errors import ConfigError

__all__ = ["gigpo"]


def gigpo(
    rewards: ArrayLike,
    trajectory_ids: ArrayLike,
    group_ids: ArrayLike,
    state_keys: Any = None,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    normalize: Literal["none", "std"] = "none",
    baseline: Baseline = "trajectory",
    valid: ArrayLike | None = None,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "reward",
    inner_group_size: int = 2,
    epsilon: float = 1e-6,
    step_groups: StepGroups | None = None,
    ddof: int = 1,
    std_floor: float = 0.0,
    lone_episode: LoneEpisode = "zero",
    mask: ArrayLike | None = None,
) -> Advantages:
    """Advantages of each step, from its episode and from its state.

    GiGPO (arXiv 2505.10978), equations 3 and 5 to 8.
    """
    rows = Rows.read(rewards, trajectory_ids, group_ids, mask)
    penalty = Penalty.read(rows, valid, invalid_action_penalty, penalty_scope)
    how = Normalization(normalize=normalize, ddof=ddof, std_floor=std_floor, epsilon=epsilon)
    groups = _step_groups(rows, state_keys, step_groups)
    returns_T = episode_returns(rows, penalty.rewards)
    episode = episode_term(
        rows, returns_T, penalty.row, baseline=baseline, lone_episode=lone_episode, how=how
    )
    returns = returns_of(rows, penalty.rewards, gamma)
    if penalty.row is not None:
        returns = returns - penalty.row
    if inner_group_size < 2:
        raise ConfigError(f"expected `inner_group_size` of 2 or more, got {inner_group_size}")
    statistics = GroupStatistics.of(returns, groups.ids, groups.num_groups)
    step = statistics.relative(returns, groups.ids, how, min_size=inner_group_size)
    weighted = omega * step
    return Advantages(
        total=rows.expand(episode + weighted),
        episode=rows.expand(episode),
        step=rows.expand(step),
        step_groups=groups.expand(rows.kept, rows.num_rows),
        diagnostics=diagnose(
            rows,
            returns_T,
            episode=episode,
            weighted_step=weighted,
            step_groups=groups,
            valid=penalty.valid,
        ),
    )


def _step_groups(rows: Rows, state_keys: Any, step_groups: StepGroups | None) -> StepGroups:
    """Groups of the M rows that count, from keys or as the caller made them."""
    if step_groups is None:
        if state_keys is None:
            raise ConfigError("expected `state_keys` or `step_groups`, got neither; pass one")
        words = key_words(state_keys, rows.num_rows)
        return group_codes(words if rows.kept is None else words[rows.kept], rows.group)
    if state_keys is not None:
        raise ConfigError("expected `state_keys` or `step_groups`, got both; pass one")
    if rows.kept is None:
        return step_groups
    return StepGroups.from_labels(step_groups.ids[rows.kept])
