"""Prompts with images as what a vision-language model reads: token ids with room for each image, and pixels.

The *processor* is the model's own, as transformers loads it from its folder. Where that needs a package that is not
installed (torchvision, for videos), `load_processor` puts the tokenizer and the image processor together itself, for
the models whose image processor says how many tokens an image takes (the Qwen-VL family).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError
from longstep.observations import IMAGE_PLACEHOLDER
from longstep.types import Message, Prompt

if TYPE_CHECKING:
    import torch

__all__ = ["ImageInputs", "ImagePrompts", "PlainProcessor", "chat_content", "load_processor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInputs:
    """One prompt with images, as the model reads it."""

    prompt_ids: NDArray[np.int32]
    """[P] token ids; an image takes as many of them as it has tokens."""
    by_token: Mapping[str, torch.Tensor]
    """Other inputs with one entry per token, each [1, P], such as `mm_token_type_ids`."""
    by_image: Mapping[str, torch.Tensor]
    """Inputs whose first axis runs over images or patches, such as `pixel_values`."""


class ImagePrompts:
    """Turns prompts with images into `ImageInputs`."""

    def __init__(self, processor: Any) -> None:
        """Args:
        processor: The model's processor: a chat template, and a call with `text` and `images`.
        """
        self._processor = processor

    def encode(self, prompt: Prompt) -> ImageInputs | str:
        """What the model reads, or the text of what is wrong with the prompt."""
        try:
            return self._encode(prompt)
        except Exception as error:  # one prompt must not spoil the others
            return f"the model's processor failed on this prompt: {type(error).__name__}: {error}"

    def _encode(self, prompt: Prompt) -> ImageInputs:
        chat = [{"role": m.role, "content": chat_content(m)} for m in prompt.messages]
        text = self._processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = dict(
            self._processor(text=[text], images=[list(prompt.images)], return_tensors="pt")
        )
        ids = inputs.pop("input_ids")
        inputs.pop("attention_mask", None)
        per_token = {k: v for k, v in inputs.items() if tuple(v.shape) == tuple(ids.shape)}
        return ImageInputs(
            prompt_ids=ids[0].numpy().astype(np.int32),
            by_token=per_token,
            by_image={k: v for k, v in inputs.items() if k not in per_token},
        )


def chat_content(message: Message) -> list[dict[str, str]]:
    """A message's content in parts, as chat templates of vision models take it: texts and places of images."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(message.content.split(IMAGE_PLACEHOLDER)):
        if index:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def load_processor(folder: str | Path, tokenizer: Any) -> Any:
    """The processor of the model in `folder`.

    Raises:
        ConfigError: The folder holds no image processor, or one that needs what is not installed.
    """
    from transformers import AutoImageProcessor, AutoProcessor

    own = "it has no image processor"
    try:
        processor = AutoProcessor.from_pretrained(folder)
        if hasattr(processor, "image_processor"):
            return processor
    except (ImportError, AttributeError, OSError, ValueError) as error:
        own = f"{type(error).__name__}: {error}"  # some insist on torchvision, for videos
    try:
        return PlainProcessor(tokenizer, AutoImageProcessor.from_pretrained(folder))
    except Exception as error:
        raise ConfigError(
            f"expected an image processor in `{folder}`, but loading it failed with {type(error).__name__}: {error}; "
            f"and the model's own processor: {own}"
        ) from error


class PlainProcessor:
    """A tokenizer and an image processor of the Qwen-VL family, put together without torchvision."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        """Args:
        tokenizer: Its chat template writes one `image_token` for each image.
        image_processor: Gives `pixel_values` and `image_grid_thw`, and has a `merge_size`.

        Raises:
            ConfigError: The two do not say how many tokens an image takes.
        """
        if not hasattr(image_processor, "merge_size"):
            raise ConfigError(
                f"expected an image processor of the Qwen-VL family, got {type(image_processor).__name__}; "
                "install torchvision, so that the model's own processor loads"
            )
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.image_token: str = getattr(tokenizer, "image_token", None) or "<|image_pad|>"

    def apply_chat_template(self, chat: Any, **options: Any) -> Any:
        """The tokenizer's chat template."""
        return self.tokenizer.apply_chat_template(chat, **options)

    def __call__(
        self, *, text: Sequence[str], images: Sequence[Sequence[Any]], return_tensors: str
    ) -> dict[str, Any]:
        """Ids and pixels of one text with its images."""
        features = self.image_processor(images=list(images[0]), return_tensors=return_tensors)
        pieces = text[0].split(self.image_token)
        grids = features["image_grid_thw"]
        if len(pieces) != len(grids) + 1:
            raise ConfigError(
                f"expected `{self.image_token}` once for each of {len(grids)} images in the chat template's text, "
                f"got it {len(pieces) - 1} times"
            )
        counts = (grids.prod(-1) // self.image_processor.merge_size**2).tolist()
        whole = pieces[0] + "".join(
            self.image_token * count + piece
            for count, piece in zip(counts, pieces[1:], strict=True)
        )
        ids = self.tokenizer([whole], add_special_tokens=False, return_tensors=return_tensors)
        token_id = self.tokenizer.convert_tokens_to_ids(self.image_token)
        return {
            "input_ids": ids["input_ids"],
            "mm_token_type_ids": (ids["input_ids"] == token_id).to(ids["input_ids"].dtype),
            **features,
        }
