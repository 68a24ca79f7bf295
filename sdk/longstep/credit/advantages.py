"""What an estimator returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_number
from longstep.credit.diagnostics import Diagnostics, diagnose
from longstep.credit.groups import StepGroups
from longstep.credit.rows import Rows
from longstep.errors import ConfigError

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


def one_term(
    rows: Rows,
    returns_T: NDArray[np.float64],
    episode: NDArray[np.float64],
    valid: NDArray[np.bool_] | None,
) -> Advantages:
    """The result of an estimator without a step term, from its [M] episode term."""
    expanded = rows.expand(episode)
    return Advantages(
        total=expanded,
        episode=expanded.copy(),
        step=np.zeros(rows.num_rows, np.float32),
        step_groups=None,
        diagnostics=diagnose(rows, returns_T, valid=valid),
    )


def two_terms(
    rows: Rows,
    returns_T: NDArray[np.float64],
    episode: NDArray[np.float64],
    step: NDArray[np.float64],
    omega: float,
    groups: StepGroups,
    valid: NDArray[np.bool_] | None,
) -> Advantages:
    """`episode + omega * step`, both [M], as a result."""
    check_number("omega", omega)
    if not math.isfinite(omega):
        raise ConfigError(f"expected a finite `omega`, got {omega}; 1.0 weighs both terms equally")
    weighted = float(omega) * step
    return Advantages(
        total=rows.expand(episode + weighted),
        episode=rows.expand(episode),
        step=rows.expand(step),
        step_groups=groups.expand(rows.kept, rows.num_rows),
        diagnostics=diagnose(
            rows, returns_T, valid=valid, step_groups=groups, terms=(episode, weighted)
        ),
    )
