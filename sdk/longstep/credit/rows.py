"""The rows of a batch, checked: what every estimator starts from.

A batch is N rows, one per step. `trajectory_ids` says which rows form a trajectory, `group_ids` which trajectories
started from the same task. Trajectories may be interleaved; the rows of one trajectory stand in order of time. Rows
whose `mask` is False are padding: they enter no sum, no mean and no count, and get 0.

Shapes: N rows of the caller, M rows that count, T trajectories, E episode groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.credit.columns import bool_column, float_column, id_codes, require_finite
from longstep.errors import DataError

__all__ = ["Rows"]

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows that count, with ids turned into small integers."""

    num_rows: int
    """N, padding included."""
    kept: NDArray[np.intp] | None
    """[M] the caller's numbers of the rows that count; None when all do."""
    rewards: NDArray[np.float64]
    """[M]"""
    trajectory: NDArray[np.int64]
    """[M] code of each row's trajectory, 0..T-1."""
    group_of_trajectory: NDArray[np.int64]
    """[T] code of each trajectory's episode group, 0..E-1; -1 for a code that no row has."""
    group: NDArray[np.int64]
    """[M] code of each row's episode group."""
    num_groups: int
    order: NDArray[np.intp] | None
    """[M] positions that put the rows trajectory by trajectory; None when they stand so already."""
    offsets: NDArray[np.int64]
    """[T + 1] where each trajectory starts among the ordered rows."""

    @classmethod
    def read(
        cls,
        rewards: ArrayLike,
        trajectory_ids: ArrayLike,
        group_ids: ArrayLike | None,
        mask: ArrayLike | None = None,
        *,
        grouped: bool = True,
    ) -> Rows:
        """Check the columns that every estimator takes.

        Args:
            rewards: [N] finite numbers.
            trajectory_ids: [N] integers or strings.
            group_ids: [N] integers or strings.
            mask: [N] True where the row counts; None counts all.
            grouped: False puts all trajectories into one group, whatever `group_ids`.

        Raises:
            DataError: Lengths differ, a reward is not finite, or a trajectory is in two groups.
        """
        all_rewards = float_column("rewards", rewards)
        num_rows = len(all_rewards)
        kept = None
        if mask is not None:
            mask_N = bool_column("mask", mask, num_rows)
            kept = None if mask_N.all() else np.flatnonzero(mask_N)
        rewards_M = all_rewards if kept is None else all_rewards[kept]
        require_finite("rewards", rewards_M, kept)
        trajectory, num_trajectories = id_codes("trajectory_ids", trajectory_ids, num_rows, kept)
        group, num_groups = np.zeros(len(rewards_M), np.int64), 1
        if grouped:
            group, num_groups = id_codes("group_ids", group_ids, num_rows, kept)
        group_of_trajectory = np.full(num_trajectories, -1, np.int64)
        group_of_trajectory[trajectory] = group
        astray = np.flatnonzero(group_of_trajectory[trajectory] != group)
        if len(astray):
            name = trajectory[astray[0]]
            at = np.flatnonzero(trajectory == name)
            other = at[np.flatnonzero(group[at] != group[at[0]])[0]]
            first_row, row = (int(a if kept is None else kept[a]) for a in (at[0], other))
            names, groups = np.asarray(trajectory_ids), np.asarray(group_ids)
            raise DataError(
                f"expected all rows of trajectory {names[row]!s} in one group of `group_ids`, got group "
                f"{groups[first_row]!s} at row {first_row} and group {groups[row]!s} at row {row}; "
                "give each trajectory its own id"
            )
        order, offsets = _time_order(trajectory, num_trajectories)
        return cls(
            num_rows=num_rows,
            kept=kept,
            rewards=rewards_M,
            trajectory=trajectory,
            group_of_trajectory=group_of_trajectory,
            group=group,
            num_groups=num_groups,
            order=order,
            offsets=offsets,
        )

    @property
    def num_trajectories(self) -> int:
        """T, codes that no row has included."""
        return len(self.group_of_trajectory)

    @property
    def longest(self) -> int:
        """Number of rows of the longest trajectory."""
        return int(np.diff(self.offsets).max(initial=0))

    @property
    def previous(self) -> NDArray[np.intp]:
        """[M] position of the step before each row in its trajectory; -1 at its first step."""
        num_rows = len(self.rewards)
        starts = self.offsets[:-1][np.diff(self.offsets) > 0]
        if self.order is None:
            previous = np.arange(-1, num_rows - 1)
            previous[starts] = -1
            return previous
        previous = np.empty(num_rows, np.intp)
        previous[self.order[1:]] = self.order[:-1]
        previous[self.order[starts]] = -1
        return previous

    @property
    def step(self) -> NDArray[np.int64]:
        """[M] position of each row in its trajectory, from 0."""
        steps = np.arange(len(self.rewards)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return steps if self.order is None else self.in_row_order(steps)

    def in_time_order(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """[M] the same values trajectory by trajectory, each in order of time."""
        return values if self.order is None else values[self.order]

    def in_row_order(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """[M] values that stand trajectory by trajectory, back in the order of the rows."""
        if self.order is None:
            return values
        result = np.empty_like(values)
        result[self.order] = values
        return result

    def caller_row(self, at: int) -> int:
        """The caller's number of a row that counts."""
        return at if self.kept is None else int(self.kept[at])

    def keep(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """[M, ...] the rows that count of [N, ...]."""
        return values if self.kept is None else values[self.kept]

    def floats(self, name: str, values: ArrayLike) -> NDArray[np.float64]:
        """[M] one more column of finite numbers, given as [N]."""
        column = self.keep(float_column(name, values, self.num_rows))
        require_finite(name, column, self.kept)
        return column

    def bools(self, name: str, values: ArrayLike) -> NDArray[np.bool_]:
        """[M] one more column of booleans, given as [N]."""
        return self.keep(bool_column(name, values, self.num_rows))

    def expand(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """[N] float32 of the caller's rows from [M] values; padding gets 0.

        Raises:
            DataError: A value is beyond float32.
        """
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        finite = np.isfinite(narrow)
        if not finite.all():
            at = int(np.argmin(finite))
            raise DataError(
                f"expected results that a float32 holds, got {values[at]} at row {self.caller_row(at)}; "
                "scale the rewards and the options down"
            )
        if self.kept is None:
            return narrow
        expanded = np.zeros(self.num_rows, np.float32)
        expanded[self.kept] = narrow
        return expanded


def _time_order(
    trajectory: NDArray[np.int64], num_trajectories: int
) -> tuple[NDArray[np.intp] | None, NDArray[np.int64]]:
    """Positions that put rows trajectory by trajectory, and where each trajectory starts."""
    offsets = np.zeros(num_trajectories + 1, np.int64)
    np.cumsum(np.bincount(trajectory, minlength=num_trajectories), out=offsets[1:])
    if (trajectory[1:] >= trajectory[:-1]).all():
        return None, offsets
    return np.argsort(trajectory, kind="stable"), offsets
