"""Prompts with images as vLLM takes them: one placeholder id for each image, and the images beside the ids.

vLLM makes room for an image itself, so ids in which there is room already are put back to one for each image first. Each
image goes with a digest of its content: what vLLM has computed of it before is found by that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError
from longstep.observations import IMAGE_PLACEHOLDER
from longstep.types import Prompt
from longstep_bindings.engines.image_prompts import chat_content
from longstep_bindings.engines.served import ScoreRow

__all__ = ["PlacedImages", "collapse", "image_prompt", "sees"]


@lru_cache(maxsize=8)
def _config(model_path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path)


def sees(model_path: str | Path) -> bool:
    """True when the model has a part that reads images; False also when its config cannot be read."""
    try:
        return hasattr(_config(str(model_path)), "vision_config")
    except (OSError, ValueError):  # vLLM says what is wrong with it
        return False


class PlacedImages:
    """Turns prompts with images into token ids."""

    def __init__(self, tokenizer: Any) -> None:
        """Args:
        tokenizer: A tokenizer whose chat template writes one placeholder for each image.
        """
        self._tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> NDArray[np.int32] | str:
        """[P] ids, or the text of what is wrong with the prompt."""
        num_places = sum(m.content.count(IMAGE_PLACEHOLDER) for m in prompt.messages)
        if num_places != len(prompt.images):  # vLLM would leave a place too many empty
            return (
                f"expected `{IMAGE_PLACEHOLDER}` once for each of {len(prompt.images)} images in the prompt, got it "
                f"{num_places} times"
            )
        chat = [{"role": m.role, "content": chat_content(m)} for m in prompt.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # one prompt must not spoil the others
            return f"the chat template failed on this prompt: {type(error).__name__}: {error}"
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int32)


def image_prompt(ids: Sequence[int], images: Sequence[NDArray[np.uint8]]) -> dict[str, Any]:
    """Ids and images as vLLM's `TokensPrompt`."""
    from PIL import Image

    return {
        "prompt_token_ids": list(ids),
        "multi_modal_data": {"image": [Image.fromarray(image) for image in images]},
        "multi_modal_uuids": {"image": [_digest(image) for image in images]},
    }


def _digest(image: NDArray[np.uint8]) -> str:
    state = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
    state.update(np.ascontiguousarray(image).data)
    return state.hexdigest()


def collapse(row: ScoreRow, model_path: str) -> ScoreRow:
    """The row with one id for each image of its prompt.

    Raises:
        DataError: The ids do not tell where each image is.
    """
    if not row.images:
        return row
    config = _config(model_path)
    image_id = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    ids = row.prompt_token_ids
    is_image = ids == image_id
    starts = np.flatnonzero(is_image & ~np.append(False, is_image[:-1]))
    if len(starts) != len(row.images):
        # Side by side, without a mark between them: then each takes the same room.
        room, rest = divmod(int(is_image.sum()), len(row.images))
        if rest or not room:
            raise DataError(
                f"expected {len(row.images)} runs of the image token {image_id} in a row's prompt, got {len(starts)}"
            )
        starts = np.flatnonzero(is_image)[::room]
    keep = ~is_image
    keep[starts] = True
    return replace(row, prompt_token_ids=ids[keep])
