"""What a batch looked like to the estimator, and plain warnings when credit cannot work on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longstep.credit.groups import StepGroups
from longstep.credit.relative import GroupStatistics
from longstep.credit.rows import Rows

__all__ = ["Diagnostics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    """Measurements of one batch. Shares are in [0, 1]; padding rows are not counted."""

    num_rows: int
    num_trajectories: int
    num_episode_groups: int
    num_lone_trajectories: int
    """Episode groups of one trajectory: nothing to compare with."""
    zero_variance_share: float
    """Share of the episode groups with at least two trajectories whose returns are all equal."""
    invalid_share: float
    """Share of rows with an invalid action; 0 when `valid` was not given."""
    group_size_histogram: Mapping[int, int]
    """Number of step groups of each size; empty without step groups."""
    singleton_share: float
    """Share of rows that are alone in their step group or in none; 1 without step groups."""
    step_variance_share: float
    """Share of the variance of the advantages that the weighted step term brings: var(w S) / (var(E) + var(w S))."""
    warnings: tuple[str, ...]
    """Plain sentences; empty when all is well."""


def diagnose(
    rows: Rows,
    returns_T: NDArray[np.float64],
    *,
    episode: NDArray[np.float64],
    weighted_step: NDArray[np.float64] | None,
    step_groups: StepGroups | None,
    valid: NDArray[np.bool_] | None,
) -> Diagnostics:
    """Measure one batch.

    Args:
        rows: The checked rows.
        returns_T: [T] return of each trajectory.
        episode: [M] episode term.
        weighted_step: [M] step term times its weight; None for estimators without one.
        step_groups: Step groups of the M rows.
        valid: [M] False where the action was invalid.
    """
    per_group = GroupStatistics.of(returns_T, rows.group_of_trajectory, rows.num_groups)
    several = per_group.counts >= 2
    sizes = np.zeros(0, np.int64) if step_groups is None else step_groups.sizes
    histogram = np.bincount(sizes)
    num_rows = len(rows.rewards)
    alone = num_rows - int(sizes[sizes >= 2].sum())
    step_variance = 0.0 if weighted_step is None or not num_rows else float(weighted_step.var())
    variance = step_variance + (float(episode.var()) if num_rows else 0.0)
    return Diagnostics(
        num_rows=num_rows,
        num_trajectories=int(per_group.counts.sum()),
        num_episode_groups=int((per_group.counts > 0).sum()),
        num_lone_trajectories=int((per_group.counts == 1).sum()),
        zero_variance_share=_share(int((per_group.squares[several] == 0.0).sum()), several.sum()),
        invalid_share=0.0 if valid is None else _share(int((~valid).sum()), num_rows),
        group_size_histogram={
            int(size): int(histogram[size]) for size in np.flatnonzero(histogram)
        },
        singleton_share=_share(alone, num_rows),
        step_variance_share=step_variance / variance if variance > 0.0 else 0.0,
        warnings=(),
    )


def _share(part: int, whole: int | np.intp) -> float:
    return part / int(whole) if whole else 0.0
