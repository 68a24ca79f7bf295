"""What a batch looked like to the estimator, and plain warnings when credit cannot work on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longstep.credit.groups import StepGroups
from longstep.credit.relative import GroupStatistics
from longstep.credit.rows import Rows

__all__ = ["Diagnostics"]

_MIN_ROWS = 16  # below this a share says little, and nothing is warned of
_ALONE = 0.9
_UNIFORM = 0.75
_INVALID = 0.3
_ONE_STATE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    """Measurements of one batch. Shares are in [0, 1]; padding rows are not counted."""

    num_rows: int
    num_trajectories: int
    num_episode_groups: int
    lone_episode_groups: int
    """Episode groups of one trajectory: nothing to compare it with."""
    zero_variance_groups: int
    """Episode groups of several trajectories that all have the same return: no signal from episodes."""
    invalid_share: float
    """Share of rows with an invalid action; 0 when `valid` was not given."""
    group_size_histogram: Mapping[int, int]
    """Number of step groups of each size; empty without step groups."""
    singleton_share: float
    """Share of rows that are alone in their step group or in none; 1 without step groups."""
    shared_share: float
    """Share of rows in a step group that at least two trajectories visit; 0 without step groups."""
    largest_group_share: float
    """The largest step group's share of the rows of its episode group; 0 without step groups."""
    step_variance_share: float
    """Share of the variance of the advantages from the weighted step term: var(w S) / (var(E) + var(w S))."""
    warnings: tuple[str, ...]
    """Plain sentences; empty when all is well, and for batches of under 16 rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """How the rows share states."""

    histogram: Mapping[int, int]
    alone: float = 1.0
    shared: float = 0.0
    largest: float = 0.0
    revisits: bool = False
    """The largest group has more than two rows for each trajectory of its episode group."""


def diagnose(
    rows: Rows,
    returns_T: NDArray[np.float64],
    *,
    valid: NDArray[np.bool_] | None = None,
    step_groups: StepGroups | None = None,
    terms: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
) -> Diagnostics:
    """Measure one batch.

    Args:
        rows: The checked rows.
        returns_T: [T] return of each trajectory.
        valid: [M] False where the action was invalid.
        step_groups: Step groups of the M rows.
        terms: [M] episode term, and [M] step term times its weight.
    """
    num_rows = len(rows.rewards)
    episodes = GroupStatistics.of(returns_T, rows.group_of_trajectory, rows.num_groups)
    sharing = _sharing(rows, step_groups, episodes.counts)
    invalid_share = float((~valid).mean()) if valid is not None and num_rows else 0.0
    lone = int((episodes.counts == 1).sum())
    uniform = int(((episodes.counts >= 2) & episodes.uniform).sum())
    compared = int((episodes.counts >= 2).sum())
    warnings = [*_episode_warnings(lone, uniform, compared), *_invalid_warnings(invalid_share)]
    if step_groups is not None:
        warnings += _state_warnings(sharing)
    return Diagnostics(
        num_rows=num_rows,
        num_trajectories=int(episodes.counts.sum()),
        num_episode_groups=int((episodes.counts > 0).sum()),
        lone_episode_groups=lone,
        zero_variance_groups=uniform,
        invalid_share=invalid_share,
        group_size_histogram=sharing.histogram,
        singleton_share=sharing.alone,
        shared_share=sharing.shared,
        largest_group_share=sharing.largest,
        step_variance_share=_step_variance_share(terms),
        warnings=tuple(warnings) if num_rows >= _MIN_ROWS else (),
    )


def _sharing(
    rows: Rows, step_groups: StepGroups | None, trajectories_E: NDArray[np.int64]
) -> _Sharing:
    if step_groups is None or not step_groups.num_groups:
        return _Sharing(histogram={})
    num_rows, sizes, ids = len(rows.rewards), step_groups.sizes, step_groups.ids
    in_group = ids >= 0
    everywhere = bool(in_group.all())
    ids_I = ids if everywhere else ids[in_group]
    trajectory_I = rows.trajectory if everywhere else rows.trajectory[in_group]
    some_trajectory = np.empty(len(sizes), np.int64)
    some_trajectory[ids_I] = trajectory_I
    several = np.zeros(len(sizes), np.bool_)
    several[ids_I[some_trajectory[ids_I] != trajectory_I]] = True
    group_of_step_group = rows.group_of_trajectory[some_trajectory]
    rows_E = np.bincount(rows.group, minlength=rows.num_groups)
    shares = sizes / rows_E[group_of_step_group]
    at = int(np.argmax(shares))
    counts = np.bincount(sizes)
    return _Sharing(
        histogram={int(size): int(counts[size]) for size in np.flatnonzero(counts)},
        alone=1.0 - int(sizes[sizes >= 2].sum()) / num_rows,
        shared=int(sizes[several].sum()) / num_rows,
        largest=float(shares[at]),
        revisits=bool(sizes[at] > 2 * trajectories_E[group_of_step_group[at]]),
    )


def _step_variance_share(terms: tuple[NDArray[np.float64], NDArray[np.float64]] | None) -> float:
    if terms is None or not len(terms[0]):
        return 0.0
    episode, step = (float(term.var()) for term in terms)
    return step / (episode + step) if episode + step > 0.0 else 0.0


def _episode_warnings(lone: int, uniform: int, compared: int) -> Iterator[str]:
    if lone:
        yield (
            f"{lone} episode groups have one trajectory, so nothing to compare it with: "
            "roll out at least two members of each group, and re-roll the ones that failed"
        )
    if compared and uniform / compared >= _UNIFORM:
        yield (
            f"in {uniform} of {compared} episode groups all trajectories have the same return, so whole episodes "
            "teach nothing: choose tasks of middling difficulty, larger groups, a denser reward, or "
            "`drop_uniform_groups`"
        )


def _invalid_warnings(invalid_share: float) -> Iterator[str]:
    if invalid_share >= _INVALID:
        yield (
            f"{invalid_share:.0%} of actions are invalid: show the format in the prompt, constrain decoding to the "
            "admissible actions, or set `invalid_action_penalty`"
        )


def _state_warnings(sharing: _Sharing) -> Iterator[str]:
    if sharing.alone >= _ALONE:
        yield (
            f"{sharing.alone:.0%} of steps are alone in their group, so the step term is nearly always 0: the anchor "
            "seems to contain a step counter, a clock or a history; pass `canonicalize` to `state_key`, or use "
            "`group_similar`"
        )
    elif sharing.shared <= 1.0 - _ALONE:
        yield (
            f"only {sharing.shared:.0%} of steps stand in a state that two trajectories visit, so trajectories are "
            'compared with their own loops: check that group members share one seed, or pass `repeats="first"`'
        )
    if sharing.largest >= _ONE_STATE and sharing.revisits:
        yield (
            f"one state holds {sharing.largest:.0%} of the steps of its episode group: a message such as "
            '"Nothing happens." seems to join unrelated states; name it in `anchors`, or raise `history_length`'
        )
