"""What an estimator returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longstep.credit.diagnostics import Diagnostics
from longstep.credit.groups import StepGroups

__all__ = ["Advantages"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """Advantages of N steps, in the order of the rows that came in; padding rows get 0."""

    total: NDArray[np.float32]
    """[N] what the loss uses."""
    episode: NDArray[np.float32]
    """[N] the part that compares whole trajectories of an episode group."""
    step: NDArray[np.float32]
    """[N] the part that compares steps in the same state, before its weight; 0 where an estimator has none."""
    step_groups: StepGroups | None
    """The step groups used; None for estimators without them."""
    diagnostics: Diagnostics
    """What the batch looked like, with plain warnings."""
