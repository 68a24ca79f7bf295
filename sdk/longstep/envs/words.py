"""The action space of the built-in environments: one of a few words."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from longstep.errors import ConfigError, UnsupportedTypeError

__all__ = ["WordSpace", "require_word"]


class WordSpace(gymnasium.Space[str]):
    """A finite set of words.

    >>> space = WordSpace(("left", "right"), seed=1)
    >>> space.sample() in space, "up" in space
    (True, False)
    """

    def __init__(self, words: tuple[str, ...], *, seed: int | None = None) -> None:
        """Args:
        words: The members, in the order that `sample` draws from.
        seed: Seed of `sample`.
        """
        if not words or len(set(words)) != len(words):
            raise ConfigError(f"expected different words, at least one, got {words!r} at `words`")
        super().__init__(dtype=str, seed=seed)
        self.words = words

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A word; with `mask` (bool[num_words], True allows) or `probability` (float[num_words])."""
        weights = None
        if mask is not None:
            allowed = np.asarray(mask, dtype=float)
            weights = allowed / allowed.sum()
        elif probability is not None:
            weights = np.asarray(probability, dtype=float)
        return self.words[int(self.np_random.choice(len(self.words), p=weights))]

    def contains(self, x: Any) -> bool:
        """True for a `str` that is one of the words."""
        return isinstance(x, str) and x in self.words

    @property
    def is_np_flattenable(self) -> bool:
        """Words have no numeric form."""
        return False

    def __repr__(self) -> str:
        return f"WordSpace({self.words!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordSpace) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)


def require_word(action: object) -> str:
    """`action` when it is a string; environments answer an unknown word, but not an action of another type."""
    if isinstance(action, str):
        return action
    raise UnsupportedTypeError(
        f"expected a word (str), got {type(action).__name__} at `action`; send one of "
        "`info['admissible_actions']`"
    )
