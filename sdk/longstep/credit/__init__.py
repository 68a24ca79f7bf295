"""Credit: rewards in, advantages out. Pure functions on arrays, numpy only, for anybody's training code.

A batch is N rows, one per step, in any order of trajectories; rows of one trajectory stand in order of time. Every
estimator takes `rewards, trajectory_ids, group_ids` and, where it looks at states, `state_keys`, and returns
`Advantages`. With numba installed, `longstep.kernels.warm_up()` makes them several times faster; the results stay the
same to the last bit.
"""

from __future__ import annotations

from longstep.credit.advantages import Advantages
from longstep.credit.diagnostics import Diagnostics
from longstep.credit.episode_estimators import grpo, reinforce_plus_plus, rloo
from longstep.credit.filters import drop_uniform_groups
from longstep.credit.graph_estimators import graph
from longstep.credit.groups import StepGroups, group_steps
from longstep.credit.history_estimators import hgpo
from longstep.credit.presets import PRESETS
from longstep.credit.returns import discounted_returns
from longstep.credit.similarity import group_similar
from longstep.credit.step_estimators import gigpo
from longstep.credit.turns import turn_gae

__all__ = [
    "PRESETS",
    "Advantages",
    "Diagnostics",
    "StepGroups",
    "discounted_returns",
    "drop_uniform_groups",
    "gigpo",
    "graph",
    "group_similar",
    "group_steps",
    "grpo",
    "hgpo",
    "reinforce_plus_plus",
    "rloo",
    "turn_gae",
]
