"""The step term: returns compared among steps in the same state."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_choice, check_count
from longstep.credit.columns import require_length
from longstep.credit.groups import Anchors, StepGroups, group_rows
from longstep.credit.relative import GroupStatistics, Normalization
from longstep.credit.rows import Rows
from longstep.errors import ConfigError, DataError
from longstep.kernels import segments
from longstep.kernels.partition import first_appearance_groups

__all__ = ["Repeats", "given_or_grouped", "step_term"]

Repeats: TypeAlias = Literal["all", "first", "mean"]


def given_or_grouped(
    rows: Rows,
    state_keys: Any,
    step_groups: StepGroups | None,
    history_length: int = 0,
    anchors: Anchors | None = None,
) -> StepGroups:
    """Step groups of the M rows that count: the caller's, or those of the state keys."""
    if step_groups is None:
        if state_keys is None:
            raise ConfigError("expected `state_keys` or `step_groups`, got neither; pass one")
        return group_rows(rows, state_keys, history_length=history_length, anchors=anchors)
    check_count("history_length", history_length, 0)
    if history_length or anchors is not None:
        raise ConfigError(
            "expected no `history_length` and no `anchors` beside `step_groups`; "
            "apply them where the groups are made, as in `group_steps`"
        )
    groups = step_groups
    if not isinstance(groups, StepGroups):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"expected StepGroups in `step_groups`, got {type(groups).__name__}; "
            "wrap numbers with `StepGroups.from_labels`"
        )
    _check_made_by_hand(groups)
    require_length("step_groups", groups.ids, rows.num_rows)
    if rows.kept is not None:
        groups = StepGroups.from_labels(groups.ids[rows.kept])
    in_group = groups.ids >= 0
    group_of = np.zeros(groups.num_groups, np.int64)
    group_of[groups.ids[in_group]] = rows.group[in_group]
    astray = np.flatnonzero(in_group & (group_of[groups.ids] != rows.group))
    if len(astray):
        raise DataError(
            f"expected each of the `step_groups` inside one episode group, got step group "
            f"{groups.ids[astray[0]]} in several at row {rows.caller_row(int(astray[0]))}; "
            "group with the same `group_ids`"
        )
    return groups


def _check_made_by_hand(groups: StepGroups) -> None:
    """Raise a `DataError` unless the groups' ids and sizes agree."""
    for name in ("ids", "sizes"):
        values: Any = getattr(groups, name)
        if not isinstance(values, np.ndarray) or cast(Any, values).dtype != np.int64:
            raise DataError(
                f"expected an array of int64 as `{name}` of `step_groups`, got {values!r:.60}; make groups with "
                "`StepGroups.from_labels`"
            )
        require_length(f"step_groups.{name}", cast("NDArray[Any]", values), None)
    ids, num_groups = groups.ids, groups.num_groups
    agree = bool(((ids >= -1) & (ids < num_groups)).all())
    if not agree or not np.array_equal(
        np.bincount(ids[ids >= 0], minlength=num_groups), groups.sizes
    ):
        raise DataError(
            "expected `sizes` of `step_groups` to count the rows of each of its `ids`, got others; make groups with "
            "`StepGroups.from_labels`"
        )


def step_term(
    rows: Rows,
    returns: NDArray[np.float64],
    groups: StepGroups,
    *,
    how: Normalization,
    min_size: int = 2,
    repeats: Repeats = "all",
) -> NDArray[np.float64]:
    """[M] each row's return relative to its step group (GiGPO equation 7); 0 in groups below `min_size`.

    Args:
        rows: The checked rows.
        returns: [M] discounted return of each row.
        groups: Step groups of the M rows.
        how: The divisor.
        min_size: Smallest number of members that is compared, at least 2.
        repeats: Members are `all` rows, the `first` of each trajectory, or the `mean` over each trajectory's rows.
    """
    check_choice("repeats", repeats, ("all", "first", "mean"))
    check_count("inner_group_size", min_size, 2)  # one member has no mean to beat
    values, ids = returns, groups.ids
    if repeats != "all":
        visits, visit_sizes = first_appearance_groups(
            rows.trajectory.view(np.uint64)[:, None], groups.ids
        )
        in_group = visits >= 0
        first = np.empty(len(visit_sizes), np.intp)
        first[visits[in_group][::-1]] = np.flatnonzero(in_group)[::-1]
        values, ids = returns[first], groups.ids[first]
        if repeats == "mean":
            sums = segments.group_sums(returns[in_group], visits[in_group], len(visit_sizes))
            values = sums / visit_sizes
    statistics = GroupStatistics.of(values, ids, groups.num_groups)
    return statistics.relative(returns, groups.ids, how, min_size=min_size)
