"""Logits of choices that the same weights have scored before.

The members of an episode group stand in the same states again and again, and at each of them the model reads the same
prompt and chooses among the same actions. Where that choice is a single token, its logits decide everything, so they
are kept for as long as the weights stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["KnownChoices"]

MAX_KNOWN = 1 << 16


class KnownChoices:
    """Logits by prompt and allowed strings, forgotten when the weights change."""

    def __init__(self, model: Any) -> None:
        """Args:
        model: Whose logits are kept.
        """
        self._model = model
        self._weights: tuple[Any, ...] = ()
        self._logits: dict[tuple[bytes, tuple[str, ...]], torch.Tensor] = {}

    def forget_if_changed(self, policy_version: int) -> None:
        """Forget everything unless version and weights are as they were.

        Weights are compared by torch's counter of in-place writes, so an update is noticed even where the version was
        not set; only a write through `.data` with the old version goes unseen.
        """
        counters = ((p.data_ptr(), p._version) for p in self._model.parameters())
        weights = (policy_version, *counters)
        if weights != self._weights or len(self._logits) > MAX_KNOWN:
            self._logits.clear()
            self._weights = weights

    def clear(self) -> None:
        """Forget everything."""
        self._logits.clear()

    def get(
        self, prompt_ids: NDArray[np.int32], allowed: tuple[str, ...] | None
    ) -> torch.Tensor | None:
        """Logits [K] of the options, or None when they are not known."""
        if allowed is None or not self._logits:
            return None
        return self._logits.get((prompt_ids.tobytes(), allowed))

    def put(
        self, prompt_ids: NDArray[np.int32], allowed: tuple[str, ...] | None, logits_K: torch.Tensor
    ) -> None:
        """Keep the logits of a prompt's options."""
        if allowed is not None:
            self._logits[prompt_ids.tobytes(), allowed] = logits_K.clone()
