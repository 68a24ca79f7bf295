"""From a rollout's columns to tensors: rows, mini-batches, packed micro-batches.

A *row* is one step: the prompt's token ids, the completion's token ids, one advantage. Rows of a micro-batch are laid
out as prefix trees (`longstep_bindings.engines.prefix_tree`), so a prompt that several rows share is computed once.
A *loss token* is a completion token that the policy had a choice in; a token that the constraint forced has
log-probability 0 under every policy and carries no loss.

Shape letters: N rows, M loss tokens, A allowed ids (padded), B rows of the layout, L their length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longstep.errors import ConfigError, DataError
from longstep_bindings.engines.prefix_tree import build_prefix_trees

__all__ = ["MicroBatch", "Rows", "minibatches", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The training rows of one rollout, columnar and ragged."""

    prompt_token_ids: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    completion_token_ids: NDArray[np.int32]
    completion_offsets: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    """Log-probability of each completion token under the policy that the ratio is taken against: the sampler, or the one
    before the update."""
    advantages: NDArray[np.float32]
    """[N] one per row; every token of the completion gets it."""
    weights: NDArray[np.float32]
    """[N] weight of each row in the loss; 0 leaves it out."""
    allowed_token_ids: NDArray[np.int32] | None = None
    allowed_offsets: NDArray[np.int64] | None = None
    importance: NDArray[np.float32] | None = None
    """Importance weight of each completion token; None means 1."""

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, NDArray[Any]], advantages: NDArray[np.floating]
    ) -> Rows:
        """Rows of `RolloutBatch.to_numpy()` with an advantage [N] for each."""
        num_rows = len(columns["rewards"])
        if advantages.shape != (num_rows,):
            raise DataError(
                f"expected one advantage for each of {num_rows} rows, got shape {advantages.shape}; "
                "compute advantages from the same batch"
            )
        return cls(
            prompt_token_ids=columns["prompt_token_ids"],
            prompt_offsets=columns["prompt_offsets"],
            completion_token_ids=columns["completion_token_ids"],
            completion_offsets=columns["completion_offsets"],
            logprobs=columns["logprobs"],
            advantages=advantages.astype(np.float32),
            weights=np.ones(num_rows, dtype=np.float32),
            allowed_token_ids=columns.get("allowed_token_ids"),
            allowed_offsets=columns.get("allowed_offsets"),
        )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.advantages)

    def prompt(self, row: int) -> NDArray[np.int32]:
        """Token ids of one row's prompt."""
        return self.prompt_token_ids[self.prompt_offsets[row] : self.prompt_offsets[row + 1]]

    def completion(self, row: int) -> NDArray[np.int32]:
        """Token ids of one row's completion."""
        start, stop = self.completion_offsets[row : row + 2]
        return self.completion_token_ids[start:stop]

    def num_choices(self) -> NDArray[np.int64]:
        """For each completion token, among how many ids it was chosen; a large number without a constraint."""
        if self.allowed_offsets is None:
            return np.full(len(self.completion_token_ids), np.iinfo(np.int64).max)
        return np.diff(self.allowed_offsets)

    def num_loss_tokens(self, rows: NDArray[np.integer]) -> int:
        """Loss tokens of some rows."""
        has_choice = np.concatenate([[0], np.cumsum(self.num_choices() > 1)])
        starts, stops = self.completion_offsets[rows], self.completion_offsets[rows + 1]
        return int(((has_choice[stops] - has_choice[starts]) * (self.weights[rows] > 0)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass reads, and where its losses are."""

    token_ids_BL: Tensor
    position_ids_BL: Tensor
    mask_BLL: Tensor | None
    """True where a token sees another; None for the plain causal layout that variable-length attention reads."""
    sources_M: Tensor
    """Flat position (in B * L) of the token whose output predicts each loss token."""
    targets_M: Tensor
    """Loss token's id; with a constraint, its column in `allowed_MA`."""
    allowed_MA: Tensor | None
    """Allowed ids, padded by repeating the first; None without a constraint."""
    num_allowed_M: Tensor | None
    old_logprobs_M: Tensor
    importance_M: Tensor | None
    advantages_M: Tensor
    weights_M: Tensor
    tokens_M: Tensor
    """Index of each loss token in the rows' completion tokens."""
    num_nodes: int
    """Tokens that pass through the model, without padding."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }
        return MicroBatch(**moved)


def minibatches(
    num_rows: int, batch_size: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Random parts of the rows, each row once; the last part may be smaller."""
    order = rng.permutation(num_rows)
    for start in range(0, num_rows, batch_size):
        yield order[start : start + batch_size]


def pack(
    rows: Rows, selected: NDArray[np.integer], *, max_tokens: int, row_length: int, use_trees: bool
) -> list[MicroBatch]:
    """The selected rows as micro-batches of at most `max_tokens` tokens each (padding included).

    Args:
        rows: All rows of the rollout.
        selected: Indices of the rows of this mini-batch.
        max_tokens: Bound on B * L of one micro-batch; a single longer row still makes one.
        row_length: L for the tree layout; see `build_prefix_trees`.
        use_trees: False lays rows out one after the other, for attention kernels that know no tree mask.

    Raises:
        ConfigError: a row alone is longer than `max_tokens`.
    """
    inputs = {int(row): _inputs(rows, int(row)) for row in selected if rows.weights[row] > 0}
    inputs = {row: ids for row, ids in inputs.items() if len(rows.completion(row))}
    if not inputs:
        return []
    longest = max(len(ids) for ids in inputs.values())
    if longest > max_tokens:
        raise ConfigError(
            f"expected rows of at most {max_tokens} tokens (`train.max_tokens_per_microbatch`), got one of {longest}; "
            "raise it, or shorten the prompts with `env.prompt.max_tokens`"
        )
    # Neighbours in this order share the longest prefixes, so a cut between micro-batches loses little.
    order = sorted(inputs, key=lambda row: inputs[row].astype(">i4").tobytes())
    num_layout_rows = max(1, max_tokens // max(row_length, longest))
    parts: list[MicroBatch] = []
    start = 0
    while start < len(order):
        stop = _fitting(inputs, order, start, num_layout_rows, max(row_length, longest), use_trees)
        part = order[start:stop]
        sequences = [inputs[row] for row in part]
        parts.append(
            _tree_layout(rows, part, sequences, max(row_length, longest))
            if use_trees
            else _plain_layout(rows, part, sequences)
        )
        start = stop
    return parts


def _inputs(rows: Rows, row: int) -> NDArray[np.int32]:
    """What the model reads for one row: the last completion token predicts nothing."""
    return np.concatenate([rows.prompt(row), rows.completion(row)[:-1]])


def _fitting(
    inputs: Mapping[int, NDArray[np.int32]],
    order: Sequence[int],
    start: int,
    num_layout_rows: int,
    row_length: int,
    use_trees: bool,
) -> int:
    """Index after the last row that still fits into one micro-batch; counts as the layouts do."""
    used, full_rows = 0, 0
    for index in range(start, len(order)):
        ids = inputs[order[index]]
        shared = 0
        if use_trees and used:
            last = inputs[order[index - 1]]
            length = min(len(last), len(ids))
            differs = np.flatnonzero(last[:length] != ids[:length])
            shared = int(differs[0]) if differs.size else length
        if used + len(ids) - shared > row_length:
            full_rows, used, shared = full_rows + 1, 0, 0
            if full_rows == num_layout_rows:
                return index
        used += len(ids) - shared
    return len(order)


def _tree_layout(
    rows: Rows, part: Sequence[int], sequences: list[NDArray[np.int32]], row_length: int
) -> MicroBatch:
    trees = build_prefix_trees(sequences, row_length=row_length)
    sources = [
        trees.nodes[trees.offsets[index] + len(rows.prompt(row)) - 1 : trees.offsets[index + 1]]
        for index, row in enumerate(part)
    ]
    return _with_losses(
        rows,
        part,
        sources,
        token_ids=trees.token_ids,
        position_ids=trees.position_ids,
        mask=trees.attention_mask(),
        num_nodes=trees.num_nodes,
    )


def _plain_layout(
    rows: Rows, part: Sequence[int], sequences: list[NDArray[np.int32]]
) -> MicroBatch:
    """One line of rows; position ids that start anew at each row tell the kernel where rows begin."""
    lengths = [len(sequence) for sequence in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sources = [
        np.arange(starts[index] + len(rows.prompt(row)) - 1, starts[index + 1])
        for index, row in enumerate(part)
    ]
    return _with_losses(
        rows,
        part,
        sources,
        token_ids=np.concatenate(sequences)[None].astype(np.int64),
        position_ids=np.concatenate([np.arange(length) for length in lengths])[None],
        mask=None,
        num_nodes=int(starts[-1]),
    )


def _with_losses(
    rows: Rows,
    part: Sequence[int],
    sources: list[NDArray[np.int64]],
    *,
    token_ids: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    mask: NDArray[np.bool_] | None,
    num_nodes: int,
) -> MicroBatch:
    counts = np.array([len(row_sources) for row_sources in sources])
    row_M = np.repeat(np.asarray(part), counts)
    first_M = np.repeat(rows.completion_offsets[np.asarray(part)], counts)
    within_M = np.concatenate([np.arange(count) for count in counts])
    tokens_M = first_M + within_M
    sources_M = np.concatenate(sources)
    has_choice = rows.num_choices()[tokens_M] > 1
    row_M, tokens_M, sources_M = row_M[has_choice], tokens_M[has_choice], sources_M[has_choice]
    targets_M = rows.completion_token_ids[tokens_M].astype(np.int64)
    allowed_MA, num_allowed_M = None, None
    if rows.allowed_offsets is not None and rows.allowed_token_ids is not None:
        allowed_MA, num_allowed_M = _padded(rows.allowed_token_ids, rows.allowed_offsets, tokens_M)
        matches = (allowed_MA == targets_M[:, None]) & (
            np.arange(allowed_MA.shape[1]) < num_allowed_M[:, None]
        )
        if not matches.any(axis=1).all():
            bad = int(tokens_M[~matches.any(axis=1)][0])
            raise DataError(
                f"expected every sampled token among its allowed ids, got id {rows.completion_token_ids[bad]} at "
                f"completion token {bad}; the engine's constraint and its record disagree"
            )
        targets_M = matches.argmax(axis=1)
    return MicroBatch(
        token_ids_BL=torch.from_numpy(token_ids),
        position_ids_BL=torch.from_numpy(position_ids),
        mask_BLL=None if mask is None else torch.from_numpy(mask),
        sources_M=torch.from_numpy(sources_M),
        targets_M=torch.from_numpy(targets_M),
        allowed_MA=None if allowed_MA is None else torch.from_numpy(allowed_MA),
        num_allowed_M=None if num_allowed_M is None else torch.from_numpy(num_allowed_M),
        old_logprobs_M=torch.from_numpy(rows.logprobs[tokens_M]),
        importance_M=None
        if rows.importance is None
        else torch.from_numpy(rows.importance[tokens_M]),
        advantages_M=torch.from_numpy(rows.advantages[row_M]),
        weights_M=torch.from_numpy(rows.weights[row_M]),
        tokens_M=torch.from_numpy(tokens_M),
        num_nodes=num_nodes,
    )


def _padded(
    flat: NDArray[np.int32], offsets: NDArray[np.int64], items: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ragged items as a rectangle, and the length of each."""
    lengths = offsets[items + 1] - offsets[items]
    width = int(lengths.max(initial=1))
    columns = np.minimum(np.arange(width), lengths[:, None] - 1)
    return flat[offsets[items][:, None] + columns].astype(np.int64), lengths
