"""Decoding restricted to a list of strings: a trie of token ids.

A node of the trie is what has been sampled so far. Its *options* are the ids that may come next. A node with a single
option is *forced*: its token has probability 1 and needs no forward pass. Where one allowed string ends and a longer one
goes on, the end-of-turn id is one more option and chooses the shorter string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstep.errors import DataError

__all__ = ["Constraints", "TrieNode", "build_trie"]

MAX_CACHED_OPTIONS = 1 << 20


@dataclass(slots=True)
class TrieNode:
    """One node of a token trie."""

    children: dict[int, TrieNode] = field(default_factory=dict)
    text: str | None = None
    """The allowed string that is complete here; None when none is."""
    options: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Ids that may come next, ascending; empty where the completion is over."""
    depth: int = 0
    """Most tokens that may still follow."""
    num_choices: int = 0
    """Most positions still to come at which there is a choice."""

    @property
    def is_over(self) -> bool:
        """True when nothing may follow."""
        return not len(self.options)


def build_trie(
    allowed: Sequence[str], token_ids: Sequence[Sequence[int]], end_of_turn_id: int | None
) -> TrieNode:
    """The root of the trie of `allowed`, whose tokens are `token_ids`.

    Raises:
        DataError: When two of the strings have the same tokens, or one of them begins another and there is no end-of-turn
            id to tell them apart.
    """
    root = TrieNode()
    for text, ids in zip(allowed, token_ids, strict=True):
        node = root
        for token_id in ids:
            node = node.children.setdefault(token_id, TrieNode())
        if node.text is not None and node.text != text:
            raise DataError(
                f"expected `allowed` strings with different tokens, got {node.text!r} and {text!r} with the same ones; "
                "drop one of them"
            )
        node.text = text
    _close(root, end_of_turn_id)
    return root


def _close(root: TrieNode, end_of_turn_id: int | None) -> None:
    """Set `options` and `depth` of every node, children first (without recursion: strings may be long)."""
    order = [root]
    for node in order:
        order.extend(node.children.values())
    for node in reversed(order):
        ids = list(node.children)
        node.depth = max((child.depth + 1 for child in node.children.values()), default=0)
        if node.text is not None and node.children:
            if end_of_turn_id is None:
                raise DataError(
                    f"expected a tokenizer with an end-of-turn token, because {node.text!r} begins another `allowed` "
                    "string; set `eos_token`, or drop one of them"
                )
            node.children[end_of_turn_id] = TrieNode(text=node.text)
            ids.append(end_of_turn_id)
        node.options = np.array(sorted(ids), dtype=np.int32)
        later = max((child.num_choices for child in node.children.values()), default=0)
        node.num_choices = later + (len(ids) > 1)


class Constraints:
    """Tries of `allowed` tuples, each built once."""

    def __init__(self, tokenizer: Any, end_of_turn_id: int | None) -> None:
        """Args:
        tokenizer: A Hugging Face tokenizer.
        end_of_turn_id: Id that ends a turn, None when the tokenizer has none.
        """
        self._tokenizer = tokenizer
        self._end_of_turn_id = end_of_turn_id
        self._tries: dict[tuple[str, ...], TrieNode] = {}
        self._num_strings = 0

    def trie(self, allowed: tuple[str, ...]) -> TrieNode:
        """The trie of `allowed`.

        Raises:
            DataError: When `allowed` is empty or its strings cannot be told apart by their tokens.
        """
        trie = self._tries.get(allowed)
        if trie is None:
            if not allowed:
                raise DataError(
                    "expected at least one `allowed` string, got none; pass None to allow anything"
                )
            if self._num_strings > MAX_CACHED_OPTIONS:
                self._tries.clear()
                self._num_strings = 0
            token_ids = self._tokenizer(list(allowed), add_special_tokens=False)["input_ids"]
            trie = build_trie(allowed, token_ids, self._end_of_turn_id)
            self._tries[allowed] = trie
            self._num_strings += len(allowed)
        return trie
