"""Evaluation: each task of a panel played once, whatever the number of environments."""

from __future__ import annotations

from collections.abc import Sequence

from longstep.policy import Policy
from longstep.rollout import Rollout
from longstep.types import Task
from longstep.vector import VectorEnv
from longstep_trainers.config import RunConfig

__all__ = ["evaluate"]


def evaluate(
    envs: VectorEnv, policy: Policy, tasks: Sequence[Task], *, config: RunConfig
) -> dict[str, float]:
    """Means over the tasks: success rate, return, episode length, invalid actions.

    The same tasks, weights and settings give the same numbers for any number of environments and at any time of a
    run: sampling depends on the task and `config.seed` alone.
    """
    batch = Rollout(
        envs,
        policy,
        group_size=1,
        max_steps=config.env.max_steps,
        max_tokens=config.generation.max_tokens,
        temperature=config.generation.eval_temperature,
        constrain=config.generation.constrain,
        seed=config.seed,
    ).collect(tasks, iteration=0)
    summary = batch.summary()
    kept = (
        "success_rate",
        "return_mean",
        "episode_length_mean",
        "invalid_action_rate",
        "num_trajectories",
        "num_failures",
    )
    return {name: summary[name] for name in kept}
