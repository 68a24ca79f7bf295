"""Named sets of the options on which the paper and its reference implementation differ.

A preset says how things are counted. What is tuned for a task (`gamma`, `omega`, `normalize`,
`invalid_action_penalty`) stays with the caller.

>>> from longstep.credit import gigpo
>>> gigpo([1.0, 0.0], [0, 1], [0, 0], ["a", "a"], **PRESETS["paper"]).total.tolist()
[1.0, -1.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypedDict

__all__ = ["PRESETS", "Preset"]


class Preset(TypedDict):
    """The options that a preset fixes."""

    baseline: Literal["trajectory", "row"]
    """`trajectory` counts each trajectory once in the episode group's mean, `row` once for each of its steps."""
    penalty_scope: Literal["reward", "row"]
    """`reward` makes the penalty for an invalid action part of the reward, `row` takes it off that row alone."""
    lone_episode: Literal["zero", "raw"]
    """The episode term of a group of one: 0, or the return itself."""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "paper": Preset(baseline="trajectory", penalty_scope="reward", lone_episode="zero"),
        "verl_agent": Preset(baseline="row", penalty_scope="row", lone_episode="raw"),
    }
)
"""`paper`: GiGPO as written (arXiv 2505.10978). `verl_agent`: what its code computes, to the last rounding."""
