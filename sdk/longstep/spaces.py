"""The space of texts. Gymnasium's own `Text` space rejects a space character by default; this one holds any string."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from longstep.errors import ConfigError

__all__ = ["TextSpace"]

_ALPHABET = np.array([chr(code) for code in range(32, 127)])
_LONGEST_SAMPLE = 64


class TextSpace(gymnasium.Space[str]):
    r"""Any string, of any length: prompts, completions, observations.

    `sample` draws up to 64 printable ASCII characters; it serves checkers, not exploration.

    >>> "Go north.\nThen open the door \N{DOOR}." in TextSpace()
    True
    >>> 3 in TextSpace()
    False
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        """Args:
        seed: Seed of `sample`, or the generator it draws from; None draws it at the first sample.
        """
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no fixed length."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A random text of 1 to 64 printable ASCII characters; `mask` and `probability` have no meaning here."""
        if mask is not None or probability is not None:
            raise ConfigError(
                "expected no `mask` and no `probability` for a TextSpace; leave both out"
            )
        length = int(self.np_random.integers(1, _LONGEST_SAMPLE + 1))
        return "".join(self.np_random.choice(_ALPHABET, size=length))

    def contains(self, x: Any) -> bool:
        """True for every str."""
        return isinstance(x, str)

    def __repr__(self) -> str:
        """`TextSpace()`."""
        return "TextSpace()"

    def __eq__(self, other: object) -> bool:
        """True for every other TextSpace: each holds the same texts."""
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        """Equal spaces hash alike."""
        return hash(TextSpace)
