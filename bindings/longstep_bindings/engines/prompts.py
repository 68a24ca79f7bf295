"""Prompts as token ids: the chat template applied, tokenised, and kept for prompts that come again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import ConfigError, require
from longstep.types import Message, Prompt

__all__ = ["PromptTokenizer", "load_tokenizer"]


def load_tokenizer(path: str | Path, *, extra: str, needed_by: str) -> Any:
    """The Hugging Face tokenizer at `path`, a folder or a name on the Hub.

    Args:
        path: Where it is.
        extra: Of longstep's, which brings transformers.
        needed_by: What is told to need it when it is not installed.

    Raises:
        ConfigError: It cannot be loaded.
        MissingExtraError: transformers is not installed.
    """
    transformers = require("transformers", extra=extra, needed_by=needed_by)
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # whatever a broken folder makes transformers raise
        raise ConfigError(
            f"expected a tokenizer at `{path}`, but loading it failed with {type(error).__name__}: {error}"
        ) from error


class PromptTokenizer:
    """Turns prompts into token ids; a prompt met before costs one look-up."""

    def __init__(self, tokenizer: Any, *, max_cached_tokens: int = 1 << 23) -> None:
        """Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        max_cached_tokens: Tokens kept in the cache; when there are more, the oldest prompts are forgotten.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "expected a tokenizer with a chat template, got one without; set `tokenizer.chat_template`"
            )
        self._tokenizer = tokenizer
        self._max_cached_tokens = max_cached_tokens
        self._num_cached_tokens = 0
        self._cache: dict[tuple[Message, ...], NDArray[np.int32]] = {}

    def encode(self, prompts: Sequence[Prompt]) -> list[NDArray[np.int32] | str]:
        """For each prompt its ids [P], or the text of what is wrong with it. Equal prompts give the same array object."""
        new = list(dict.fromkeys(p.messages for p in prompts if p.messages not in self._cache))
        found: dict[tuple[Message, ...], NDArray[np.int32] | str] = {}
        try:
            found.update(zip(new, self._encode(new), strict=True))
        except Exception:  # one prompt must not spoil the others: find out which it is
            for messages in new:
                try:
                    found[messages] = self._encode([messages])[0]
                except Exception as error:
                    found[messages] = (
                        f"the chat template failed on this prompt: {type(error).__name__}: {error}"
                    )
        results = [self._result(prompt, found) for prompt in prompts]
        for messages, ids in found.items():
            if not isinstance(ids, str):
                self._keep(messages, ids)
        return results

    def _result(
        self, prompt: Prompt, found: dict[tuple[Message, ...], NDArray[np.int32] | str]
    ) -> NDArray[np.int32] | str:
        if prompt.images:
            return (
                "expected a prompt without images, got one with images at an engine that reads text; give it the "
                "model's `processor`"
            )
        ids = found.get(prompt.messages)
        return ids if ids is not None else self._cache[prompt.messages]

    def _encode(self, conversations: Sequence[tuple[Message, ...]]) -> list[NDArray[np.int32]]:
        if not conversations:
            return []
        chats = [
            [{"role": m.role, "content": m.content} for m in messages] for messages in conversations
        ]
        texts = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=False
        )
        # The template writes special tokens itself; the tokenizer must not add them a second time.
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.int32) for row in ids]

    def _keep(self, messages: tuple[Message, ...], ids: NDArray[np.int32]) -> None:
        self._cache[messages] = ids
        self._num_cached_tokens += len(ids)
        while self._num_cached_tokens > self._max_cached_tokens:
            oldest = next(iter(self._cache))
            self._num_cached_tokens -= len(self._cache.pop(oldest))
