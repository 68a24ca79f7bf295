"""Random draws that are the same on every machine and for every numpy.

numpy keeps the raw stream of a bit generator stable, but not what `Generator.integers` or `shuffle` make of it. The
built-in environments therefore draw from the raw stream; a room made from a seed today is the room of that seed for
good, and panels of tasks keep their hashes.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

import numpy as np

__all__ = ["Draws"]


class Draws:
    """Integers, picks and shuffles from the raw stream of a generator.

    >>> draws = Draws(np.random.Generator(np.random.PCG64(7)))
    >>> [draws.below(6) for _ in range(8)]
    [3, 5, 4, 1, 1, 5, 0, 4]
    """

    __slots__ = ("_raw",)

    def __init__(self, generator: np.random.Generator) -> None:
        """Args:
        generator: Its bit generator is advanced by one 64-bit word per draw.
        """
        self._raw = generator.bit_generator.random_raw

    def below(self, bound: int) -> int:
        """An integer in [0, bound); uneven by less than `bound / 2**64`."""
        return (int(self._raw()) * bound) >> 64

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Put `items` in random order, in place (Fisher-Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]

    def distinct(self, count: int, bound: int, *, but: tuple[int, ...] = ()) -> list[int]:
        """`count` different integers in [0, bound), none of them in `but`, in random order."""
        chosen: list[int] = []
        while len(chosen) < count:
            number = self.below(bound)
            if number not in but and number not in chosen:
                chosen.append(number)
        return chosen
