"""Text and token ids of a model that vLLM serves: prompts, choices, ends of turns, and ids as text again.

All of this is done here, not by vLLM, so that ids mean the same as in the transformers engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.types import Prompt
from longstep_bindings.engines.constraint import Constraints
from longstep_bindings.engines.prompts import PromptTokenizer, load_tokenizer
from longstep_bindings.engines.vllm_images import PlacedImages, sees

__all__ = ["ModelText"]


class ModelText:
    """What a model reads and writes, as token ids and as text."""

    def __init__(self, model_path: str | Path) -> None:
        """Args:
        model_path: The model folder, or a name on the Hub.

        Raises:
            ConfigError: Its tokenizer cannot be loaded, or has no chat template.
        """
        self._tokenizer = load_tokenizer(model_path, extra="vllm", needed_by='engine "vllm"')
        self._prompts = PromptTokenizer(self._tokenizer)
        self._images = PlacedImages(self._tokenizer) if sees(model_path) else None
        eos_id = self._tokenizer.eos_token_id
        self.constraints = Constraints(self._tokenizer, eos_id if isinstance(eos_id, int) else None)
        """Choices as tries."""
        self.end_ids = _end_of_turn_ids(model_path, self._tokenizer)
        """Every id that ends a turn."""

    @property
    def takes_images(self) -> bool:
        """True when prompts may hold images."""
        return self._images is not None

    def encode(self, prompts: Sequence[Prompt]) -> list[NDArray[np.int32] | str]:
        """Each prompt's ids, with one id for each image, or what is wrong with the prompt."""
        images = self._images
        if images is None:
            return self._prompts.encode(prompts)
        of_text = iter(self._prompts.encode([prompt for prompt in prompts if not prompt.images]))
        return [images.encode(p) if p.images else next(of_text) for p in prompts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _end_of_turn_ids(model_path: str | Path, tokenizer: Any) -> list[int]:
    """Every id that ends a turn, by the tokenizer or by the model's generation config."""
    from transformers import GenerationConfig

    configured: Any = None
    with suppress(OSError, ValueError):  # many models have none
        configured = GenerationConfig.from_pretrained(model_path).eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int)})
