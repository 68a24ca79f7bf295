"""Token sequences laid out as prefix trees: every shared prefix is computed once.

At each step of an agent the model reads system prompt, task, memory and observation anew, and the members of an
episode group read much the same; so sequences of one batch share long prefixes. Sorted sequences form a tree, and the
tree written in depth-first order has a simple attention rule: token i sees token j when j stands on the path from the
root to i, that is when `j <= i < ends[j]`, `ends[j]` being the end of j's subtree. One forward pass over the tree gives
for each sequence the same hidden states as a pass over that sequence alone.

Words: a *row* is one line of the padded [B, L] layout and holds one or more trees; a *node* is one token in it.
Left out: anything of torch; engines and trainers turn these arrays into tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PrefixTrees", "build_prefix_trees"]

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTrees:
    """Sequences in tree layout. B rows of L positions; N sequences."""

    token_ids: Int64Array
    """[B, L] the tokens; padding is 0."""
    position_ids: Int64Array
    """[B, L] depth of each token in its tree: its position in the sequences it belongs to."""
    ends: Int64Array
    """[B, L] column after the last descendant of each token. Padding sees itself alone."""
    nodes: Int64Array
    """[sum of lengths] flat index (row * L + column) of each token of each sequence, in the order given."""
    offsets: Int64Array
    """[N + 1] where each sequence begins in `nodes`."""
    num_nodes: int
    """Tokens laid out, without padding."""

    def attention_mask(self) -> NDArray[np.bool_]:
        """[B, L, L] True where the token of the second axis sees the token of the third."""
        columns = np.arange(self.ends.shape[1])
        is_before = columns[None, :] <= columns[:, None]
        return is_before[None] & (columns[None, :, None] < self.ends[:, None, :])


def build_prefix_trees(
    sequences: Sequence[NDArray[np.integer]], *, row_length: int = 256
) -> PrefixTrees:
    """The sequences as prefix trees, as many to a row as fit.

    Args:
        sequences: N non-empty arrays of token ids.
        row_length: Length of a row; the longest sequence where that is longer. Attention costs grow with its square,
            so it should be a small multiple of the usual sequence.
    """
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    assert lengths.size > 0
    assert lengths.min() > 0
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    row_length = max(row_length, int(lengths.max()))
    # Big-endian bytes of non-negative ids sort as the ids do.
    keys = [np.ascontiguousarray(sequence, dtype=">i4").tobytes() for sequence in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)

    nodes = np.empty(int(offsets[-1]), dtype=np.int64)
    placed: list[tuple[int, int, int, NDArray[np.integer]]] = []  # row, column, depth, tokens
    closes: list[tuple[int, NDArray[np.int64], int]] = []  # row, columns of nodes, their end
    row, used = 0, 0
    path = np.empty(0, dtype=np.int64)  # columns from the root to the last token placed
    last: NDArray[np.integer] = np.empty(0, dtype=np.int64)
    for index in order:
        tokens = np.asarray(sequences[index])
        shared = _common_prefix_length(last, tokens)
        if used + len(tokens) - shared > row_length:
            closes.append((row, path, used))
            row, used, shared, path = row + 1, 0, 0, path[:0]
        if shared < len(path):
            closes.append((row, path[shared:], used))
        fresh = len(tokens) - shared
        if fresh:
            placed.append((row, used, shared, tokens[shared:]))
            path = np.concatenate([path[:shared], np.arange(used, used + fresh)])
            used += fresh
        else:
            path = path[:shared]
        nodes[offsets[index] : offsets[index + 1]] = row * row_length + path
        last = tokens
    closes.append((row, path, used))
    return _filled(placed, closes, nodes, offsets, shape=(row + 1, row_length))


def _common_prefix_length(first: NDArray[np.integer], second: NDArray[np.integer]) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if differs.size else length


def _filled(
    placed: list[tuple[int, int, int, NDArray[np.integer]]],
    closes: list[tuple[int, NDArray[np.int64], int]],
    nodes: Int64Array,
    offsets: Int64Array,
    *,
    shape: tuple[int, int],
) -> PrefixTrees:
    token_ids = np.zeros(shape, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    ends = np.broadcast_to(np.arange(1, shape[1] + 1), shape).copy()
    for row, column, depth, tokens in placed:
        stop = column + len(tokens)
        token_ids[row, column:stop] = tokens
        position_ids[row, column:stop] = np.arange(depth, depth + len(tokens))
    for row, columns, end in closes:
        ends[row, columns] = end
    return PrefixTrees(
        token_ids=token_ids,
        position_ids=position_ids,
        ends=ends,
        nodes=nodes,
        offsets=offsets,
        num_nodes=sum(len(tokens) for *_, tokens in placed),
    )
