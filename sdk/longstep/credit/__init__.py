"""Credit: rewards in, advantages out. Pure functions on arrays, numpy only, for anybody's training code."""

from __future__ import annotations

from longstep.credit.advantages import Advantages
from longstep.credit.diagnostics import Diagnostics
from longstep.credit.episode_estimators import grpo
from longstep.credit.groups import StepGroups, group_steps
from longstep.credit.presets import PRESETS
from longstep.credit.returns import discounted_returns
from longstep.credit.step_estimators import gigpo

__all__ = [
    "PRESETS",
    "Advantages",
    "Diagnostics",
    "StepGroups",
    "discounted_returns",
    "gigpo",
    "group_steps",
    "grpo",
]
