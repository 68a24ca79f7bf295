"""Which steps stand in the same state: step groups.

A *step group* holds the rows of one episode group whose state keys are equal. Ids are dense and numbered in the order
in which groups first appear, so the same rows give the same ids in every process. A row with id -1 belongs to no
group: a padding row, or a state that was declared to anchor nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.credit.keys import key_words
from longstep.credit.rows import bool_column, id_codes
from longstep.errors import DataError
from longstep.kernels.partition import first_appearance_ids

__all__ = ["StepGroups", "group_steps"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGroups:
    """A partition of N rows into step groups.

    >>> groups = StepGroups.from_labels([7, 7, 3, -1, 7])
    >>> groups.ids.tolist(), groups.sizes.tolist()
    ([0, 0, 1, -1, 0], [3, 1])
    """

    ids: NDArray[np.int64]
    """[N] number of each row's group, 0..G-1 in order of first appearance; -1 when the row is in no group."""
    sizes: NDArray[np.int64]
    """[G] number of rows of each group, at least 1."""

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.sizes)

    @classmethod
    def from_labels(cls, labels: ArrayLike) -> StepGroups:
        """Groups of the rows that carry the same integer; a negative label means no group.

        Args:
            labels: [N] integers, with gaps and in any order.

        Raises:
            DataError: `labels` is not one-dimensional or not of integers.
        """
        labels_N = np.asarray(labels)
        if labels_N.ndim != 1 or (labels_N.size and labels_N.dtype.kind not in "iu"):
            raise DataError(
                f"expected one integer per row in `labels`, got {labels_N.dtype} of shape "
                f"{labels_N.shape}; number the groups"
            )
        in_group_N = labels_N >= 0
        _, first_G, inverse = np.unique(
            labels_N[in_group_N], return_index=True, return_inverse=True
        )
        rank_G = np.empty(len(first_G), np.int64)
        rank_G[np.argsort(first_G)] = np.arange(len(first_G))
        ids_N = np.full(len(labels_N), -1, np.int64)
        ids_N[in_group_N] = rank_G[inverse]
        return cls(ids=ids_N, sizes=np.bincount(ids_N[in_group_N], minlength=len(first_G)))

    def rows(self) -> list[NDArray[np.int64]]:
        """The row numbers of each group, ascending; rows of no group are left out."""
        order = np.argsort(self.ids, kind="stable")
        order = order[np.searchsorted(self.ids[order], 0) :]
        return np.split(order, np.cumsum(self.sizes)[:-1]) if self.num_groups else []

    def expand(self, kept: NDArray[np.intp] | None, num_rows: int) -> StepGroups:
        """The same groups among [N] rows, of which these were only the `kept`; None for all."""
        if kept is None:
            return self
        ids = np.full(num_rows, -1, np.int64)
        ids[kept] = self.ids
        return StepGroups(ids=ids, sizes=self.sizes)


def group_steps(
    state_keys: Any, group_ids: ArrayLike, *, mask: ArrayLike | None = None
) -> StepGroups:
    """Step groups: rows of one episode group with equal state keys.

    GiGPO (arXiv 2505.10978), equation 6. Exact: 128-bit keys are compared whole.

    >>> group_steps(["hall", "cave", "hall", "hall"], [0, 0, 0, 1]).ids.tolist()
    [0, 1, 0, 2]

    Args:
        state_keys: [N] 16-byte voids, integers [N] or [N, 2], or a sequence of str, bytes or int.
        group_ids: [N] integers or strings.
        mask: [N] False for padding rows, which are in no group; None counts all rows.

    Raises:
        DataError: Lengths differ.
        UnsupportedTypeError: A key is of a type without a fixed identity.
    """
    num_rows = len(np.asarray(group_ids))
    kept = None if mask is None else np.flatnonzero(bool_column("mask", mask, num_rows))
    codes, _ = id_codes("group_ids", group_ids, num_rows, kept)
    words = key_words(state_keys, num_rows)
    ids = group_codes(words if kept is None else words[kept], codes)
    return ids.expand(kept, num_rows)


def group_codes(words: NDArray[np.uint64], group: NDArray[np.int64]) -> StepGroups:
    """Step groups of [M, W] key words within [M] episode groups."""
    ids, num_groups = first_appearance_ids(np.column_stack((words, group.astype(np.uint64))))
    return StepGroups(ids=ids, sizes=np.bincount(ids, minlength=num_groups))
