"""Values relative to their group: the one piece of arithmetic that all group estimators share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_choice, check_count, check_number
from longstep.errors import ConfigError
from longstep.kernels import segments

__all__ = ["ROUNDING", "GroupStatistics", "Normalization", "check_ddof"]

ROUNDING = 1e-9  # of the mean: equal sums of rewards in another order differ by about 1e-15 of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """What a centred value is divided by: 1, or the standard deviation of its group."""

    normalize: Literal["none", "std"] = "none"
    """`none` divides by 1 (the paper's F_norm = 1), `std` by `max(std, std_floor) + epsilon`."""
    ddof: int = 1
    """Degrees of freedom taken off the count in the variance: 1 is the unbiased estimate."""
    std_floor: float = 0.0
    """Smallest standard deviation to divide by; keeps nearly equal returns from being blown up."""
    epsilon: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, ("none", "std"))
        check_ddof("ddof", self.ddof)
        for name, value in (("std_floor", self.std_floor), ("epsilon", self.epsilon)):
            check_number(name, value)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"expected `{name}` of 0 or more, got {value}; pass such as 1e-6")


def check_ddof(name: str, value: int) -> None:
    """Raise a `ConfigError` unless the degrees of freedom are 0 or 1."""
    check_count(name, value, 0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStatistics:
    """Mean and spread of the members of each of G groups."""

    counts: NDArray[np.int64]
    """[G] members of each group."""
    means: NDArray[np.float64]
    """[G]"""
    squares: NDArray[np.float64]
    """[G] sums of squared deviations from the mean."""

    @classmethod
    def of(
        cls, values: NDArray[np.float64], ids: NDArray[np.int64], num_groups: int
    ) -> GroupStatistics:
        """Statistics of [K] values by their group; a negative id belongs to none."""
        counts, means, squares = segments.group_statistics(values, ids, num_groups)
        return cls(counts=counts, means=means, squares=squares)

    @property
    def uniform(self) -> NDArray[np.bool_]:
        """[G] True where all members are equal, up to the rounding of the sums that made them."""
        return self.squares <= self.counts * np.square(ROUNDING * self.means)

    def relative(
        self,
        values: NDArray[np.float64],
        ids: NDArray[np.int64],
        how: Normalization,
        *,
        min_size: int = 2,
    ) -> NDArray[np.float64]:
        """Values minus the mean of their group, divided as `how` says.

        Under `std` without a floor a group of equal members gives 0 to every value: it has no scale to measure by.

        Args:
            values: [M] any values, members or not.
            ids: [M] their groups; a negative id gives 0.
            how: The divisor.
            min_size: Groups with fewer members give 0.
        """
        offsets, scales = self.means.copy(), np.ones(len(self.means))
        if how.normalize == "std":
            variances = self.squares / np.maximum(self.counts - how.ddof, 1)
            floor, epsilon = float(how.std_floor), float(how.epsilon)
            deviations = np.maximum(np.sqrt(variances), floor) + epsilon
            with_scale = (deviations > 0.0) & ~(self.uniform & (floor == 0.0))
            scales = np.divide(1.0, deviations, out=np.zeros_like(deviations), where=with_scale)
        scales[self.counts < min_size] = 0.0
        return segments.centre_and_scale(values, ids, offsets, scales)
