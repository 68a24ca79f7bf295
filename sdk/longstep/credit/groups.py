"""Which steps stand in the same state: step groups.

A *step group* holds the rows of one episode group whose state keys are equal. Ids are dense and numbered in the order
in which groups first appear, so the same rows give the same ids in every process. A row with id -1 belongs to no
group: a padding row, or a state that was declared to anchor nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstep.arguments import check_count
from longstep.credit.columns import as_array, require_length
from longstep.credit.keys import key_words
from longstep.credit.rows import Rows
from longstep.errors import ConfigError, DataError
from longstep.kernels.partition import first_appearance_groups

__all__ = ["Anchors", "StepGroups", "group_steps"]

Anchors: TypeAlias = ArrayLike | Callable[[Any], bool]


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
        labels_N = as_array("labels", labels, "integers")
        require_length("labels", labels_N, None)
        if labels_N.size and labels_N.dtype.kind not in "iu":
            raise DataError(
                f"expected integers in `labels`, got {labels_N.dtype}; number the groups"
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
    state_keys: Any,
    group_ids: ArrayLike,
    *,
    trajectory_ids: ArrayLike | None = None,
    history_length: int = 0,
    anchors: Anchors | None = None,
    mask: ArrayLike | None = None,
) -> StepGroups:
    """Step groups: rows of one episode group with equal state keys.

    GiGPO (arXiv 2505.10978), equation 6. Exact: keys are compared whole. Linear in the number of rows with compiled
    kernels, one sort without.

    >>> group_steps(["hall", "cave", "hall", "hall"], [0, 0, 0, 1]).ids.tolist()
    [0, 1, 0, 2]
    >>> group_steps(["hall", "what?", "what?"], [0, 0, 0], anchors=lambda key: key != "what?").ids.tolist()
    [0, -1, -1]

    Args:
        state_keys: [N] 16-byte voids, integers [N] or [N, 2], or a sequence of str, bytes or int.
        group_ids: [N] integers or strings.
        trajectory_ids: [N] integers or strings; needed for a history.
        history_length: Number of earlier states of the same trajectory that must be equal too; rows nearer to the
            start than that must be equally near.
        anchors: Which states may form a group: [N] booleans, or a function that is called once with each distinct key
            (a 16-byte void comes as bytes). Other rows are in no group. None means all.
        mask: [N] False for padding rows, which are in no group; None counts all rows.

    Raises:
        DataError: Lengths differ.
        UnsupportedTypeError: A key is of a type without a fixed identity.
        ConfigError: A history without `trajectory_ids`.
    """
    check_count("history_length", history_length, 0)
    column = as_array("group_ids", group_ids, "integers or strings")
    require_length("group_ids", column, None)
    num_rows = len(column)
    if trajectory_ids is None:
        if history_length:
            raise ConfigError(
                f"expected `trajectory_ids` with `history_length` {history_length}, got None; "
                "pass them: a history is that of a trajectory"
            )
        trajectory_ids = np.arange(num_rows)
    rows = Rows.read(np.zeros(num_rows), trajectory_ids, group_ids, mask)
    groups = group_rows(rows, state_keys, history_length=history_length, anchors=anchors)
    return groups.expand(rows.kept, num_rows)


def group_rows(
    rows: Rows, state_keys: Any, *, history_length: int = 0, anchors: Anchors | None = None
) -> StepGroups:
    """Step groups of the M rows that count; the arguments are those of `group_steps`."""
    check_count("history_length", history_length, 0)
    words = key_words(state_keys, rows.num_rows)
    classes = rows.group
    if anchors is not None:
        if callable(anchors):
            anchoring = rows.keep(_ask_once_per_key(anchors, state_keys, words))
        else:
            anchoring = rows.bools("anchors", anchors)
        classes = np.where(anchoring, rows.group, -1)
    words = rows.keep(words)
    if history_length:
        num_states = min(history_length, rows.longest) + 1  # more of them tell nothing more apart
        *_, codes = itertools.islice(history_codes(rows, words), num_states)
        words = codes.view(np.uint64)[:, None]
    return group_equal(words, classes)


def group_equal(words: NDArray[np.uint64], classes: NDArray[np.int64]) -> StepGroups:
    """Groups of rows with equal [M, W] words within one of [M] classes; a negative class is in no group."""
    ids, sizes = first_appearance_groups(words, classes)
    return StepGroups(ids=ids, sizes=sizes)


def history_codes(rows: Rows, words: NDArray[np.uint64]) -> Iterator[NDArray[np.int64]]:
    """[M] codes, equal where the last 1, 2, 3 ... states of a trajectory are equal, episode groups apart.

    A row with fewer states than that behind it equals only rows that have as few.

    Args:
        rows: The checked rows.
        words: [M, W] key words.
    """
    states, _ = first_appearance_groups(words, np.zeros(len(words), np.int64))
    previous, codes = rows.previous, states
    is_first = previous < 0
    while True:
        yield codes
        before = np.where(is_first, 0, codes[previous] + 1)
        codes, _ = first_appearance_groups(states.view(np.uint64)[:, None], before)


def _ask_once_per_key(
    anchors: Callable[[Any], bool], state_keys: Any, words: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """[N] the answers of a predicate on keys."""
    ids, sizes = first_appearance_groups(words, np.zeros(len(words), np.int64))
    answers = np.empty(len(sizes), np.bool_)
    first_rows = np.empty(len(sizes), np.int64)
    first_rows[ids[::-1]] = np.arange(len(ids))[::-1]
    for number, row in enumerate(first_rows.tolist()):
        key = state_keys[row]
        answers[number] = may_anchor(
            anchors, key.tobytes() if isinstance(key, np.void) else key, row
        )
    return answers[ids]


def may_anchor(anchors: Callable[[Any], bool], key: Any, row: int) -> bool:
    """What a predicate says of the key of a row, or a `ConfigError` when it says neither True nor False."""
    answer: Any = anchors(key)
    if answer is True or answer is False:
        return answer
    if not isinstance(answer, np.bool_):
        raise ConfigError(
            f"expected True or False from the function `anchors`, got {answer!r:.60} for the key at row {row}"
        )
    return bool(cast(Any, answer))
