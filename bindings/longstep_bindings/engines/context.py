"""What a transformers model has read for the rows of a batch: its cache, with what is padding in it.

Shape letters: B rows, T positions in the cache, L new positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstep_bindings.engines.tree_prefill import can_prefill_tree, prefill_tree

if TYPE_CHECKING:
    import torch

__all__ = ["Context"]

MIN_SHARED_PREFIX = 8


class Context:
    """What the model has read for each row: keys and values, which of them are padding, and the next position."""

    def __init__(self, model: Any, *, keep: bool) -> None:
        """Args:
        model: The model.
        keep: False when nothing will follow the prefill, so that keys and values need not be stored.
        """
        from transformers import DynamicCache

        self._model = model
        self._keep = keep
        self._new_cache = lambda: DynamicCache(config=model.config)
        # transformers 5.24 renamed the argument.
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        parameters = inspect.signature(type(base).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cache: Any = None
        self._real_BT = np.ones((1, 0), dtype=bool)
        self._next_B = np.zeros(1, dtype=np.int64)

    def prefill(self, sequences: Sequence[NDArray[np.int32]]) -> torch.Tensor:
        """Logits [B, V] after each sequence; what the sequences share at their beginning is computed once."""
        if can_prefill_tree(self._model):
            self._cache = self._new_cache() if self._keep else None
            logits_BV = prefill_tree(self._model, sequences, self._cache)
            self._next_B = np.array([len(sequence) for sequence in sequences])
            self._real_BT = np.arange(self._next_B.max()) < self._next_B[:, None]
            return logits_BV
        shared = _shared_prefix(sequences)
        if len(sequences) < 2 or shared < MIN_SHARED_PREFIX:
            self._start(len(sequences))
            return self.extend(sequences)
        self._start(1)
        keep, self._keep = self._keep, True
        self.extend([sequences[0][:shared]])
        self.select([0] * len(sequences))
        self._keep = keep
        return self.extend([sequence[shared:] for sequence in sequences])

    def _start(self, num_rows: int) -> None:
        self._real_BT = np.ones((num_rows, 0), dtype=bool)
        self._next_B = np.zeros(num_rows, dtype=np.int64)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        import torch

        if rows == list(range(len(self._next_B))):
            return
        self._real_BT, self._next_B = self._real_BT[rows], self._next_B[rows]
        self._cache.batch_select_indices(torch.tensor(rows, device=self._model.device))

    def extend(self, chunks: Sequence[NDArray[np.int32]]) -> torch.Tensor:
        """Read a chunk of new ids in each row; gives the logits [B, V] after its last one."""
        import torch

        lengths_B = np.array([len(chunk) for chunk in chunks])
        longest = int(lengths_B.max())
        real_BL = np.arange(longest) >= longest - lengths_B[:, None]
        ids_BL = np.zeros((len(chunks), longest), dtype=np.int64)
        ids_BL[real_BL] = np.concatenate(chunks)
        positions_BL = self._next_B[:, None] + real_BL.cumsum(-1) - 1
        self._real_BT = np.concatenate([self._real_BT, real_BL], axis=1)
        self._next_B = self._next_B + lengths_B
        if self._cache is None and self._keep:
            self._cache = self._new_cache()
        device = self._model.device
        output = self._model(
            input_ids=torch.from_numpy(ids_BL).to(device),
            attention_mask=None
            if self._real_BT.all()
            else torch.from_numpy(self._real_BT).to(device),
            position_ids=torch.from_numpy(positions_BL.clip(min=0)).to(device),
            use_cache=self._cache is not None,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        return output.logits[:, -1]


def _shared_prefix(sequences: Sequence[NDArray[np.int32]]) -> int:
    """How many ids all sequences begin with, at least one being left over in each."""
    shortest = min(len(sequence) for sequence in sequences) - 1
    heads = np.stack([sequence[:shortest] for sequence in sequences])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest
