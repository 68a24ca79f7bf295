"""One trajectory on its way through a collection, and the checks of what environment and policy give for it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from longstep.arguments import check_count
from longstep.commands import EnvResult
from longstep.errors import ConfigError
from longstep.types import Completion, Prompt, StepRecord, Task

__all__ = [
    "Member",
    "allowed_completions",
    "checked_task",
    "fault_of_completion",
    "fault_of_result",
    "trajectory_id_of",
]

_INFO_OF_RESET: dict[str, type | tuple[type, ...]] = {"prompt": Prompt, "state_key": bytes}
_INFO_OF_STEP = {
    **_INFO_OF_RESET,
    "action": str,
    "action_valid": bool,
    "raw_reward": (float, int, np.number),
}

_LARGEST_REWARD = 3.4028234e38
"""Beyond it float32, the type of reward columns, has only infinity."""


class Member:
    """A place in an episode group, at one attempt."""

    __slots__ = (
        "asked_at",
        "attempt",
        "completion",
        "generate_s",
        "group",
        "index",
        "info",
        "invalid_in_row",
        "num_tokens",
        "slot",
        "steps",
        "success",
        "task",
        "trajectory_id",
    )

    def __init__(
        self, task: Task, group: int, index: int, attempt: int, trajectory_id: str
    ) -> None:
        """Args:
        index: Which member of the group, from 0.
        attempt: 0, or how often the member has been played again.
        """
        self.task, self.group, self.index, self.attempt = task, group, index, attempt
        self.trajectory_id = trajectory_id
        self.slot = -1
        self.info: dict[str, Any] = {}
        """Of the last result: the state the next action is chosen in."""
        self.steps: list[StepRecord] = []
        self.asked_at = self.generate_s = 0.0
        self.completion: Completion | None = None
        """What the environment is stepping with; None while it is reset and while the policy is asked."""
        self.num_tokens = self.invalid_in_row = 0
        self.success = False


def trajectory_id_of(
    seed: int, iteration: int, task: Task, group: int, member: int, attempt: int
) -> str:
    """Unique and readable; equal for equal arguments in every process and Python version.

    >>> trajectory_id_of(0, 3, Task(env_id="maze", seed=7), 1, 2, 0)
    'i3g1m2-503ac61b198bfec6'
    """
    parts = (seed, iteration, group, member, attempt, task.seed, task.task_id)
    digest = xxh3_64_intdigest("|".join(map(str, parts)).encode("utf-8", "surrogatepass"))
    again = f"r{attempt}" if attempt else ""
    return f"i{iteration}g{group}m{member}{again}-{digest:016x}"


def checked_task(task: Any, place: str) -> Task:
    """The task itself.

    Raises:
        ConfigError: It is none; the message names `place`.
    """
    if not isinstance(task, Task):
        raise ConfigError(
            f"expected a Task, got {task!r:.100} at `{place}`; write Task(env_id=..., seed=...)"
        )
    check_count(f"{place}.seed", task.seed, 0)
    return task


def fault_of_result(result: EnvResult, *, is_step: bool) -> str | None:
    """What makes a result unusable, or None.

    Raises:
        ConfigError: The info is not that of a text environment at all.
    """
    info = result.info
    for key, kind in (_INFO_OF_STEP if is_step else _INFO_OF_RESET).items():
        if not isinstance(info.get(key), kind):
            raise ConfigError(
                f"expected info[{key!r}] from the environment in slot {result.slot} as LLMAgentEnv "
                f"gives it, got {type(info.get(key)).__name__}; wrap the environment: "
                "LLMAgentEnv(env)"
            )
    for reward in (result.reward, info["raw_reward"] if is_step else 0.0):
        if not abs(reward) <= _LARGEST_REWARD:
            return f"expected a finite float32 reward from the environment, got {reward}"
    if len(info["state_key"]) != 16:
        return f"expected a `state_key` of 16 bytes, got {len(info['state_key'])}"
    return None


def fault_of_completion(completion: Completion) -> str | None:
    """What makes a completion unusable for training, or None."""
    if not isinstance(cast(Any, completion.text), str):
        return f"expected a str as the completion's text, got {type(completion.text).__name__}"
    num_tokens, allowed = len(completion.token_ids), completion.allowed_token_ids
    if len(completion.logprobs) != num_tokens:
        return f"expected {num_tokens} logprobs from the policy, got {len(completion.logprobs)}"
    if allowed is not None and len(allowed) != num_tokens:
        return f"expected {num_tokens} sets of allowed token ids, got {len(allowed)}"
    if not np.isfinite(completion.logprobs).all():
        return "expected finite logprobs from the policy, got NaN or infinity"
    return None


def allowed_completions(info: dict[str, Any]) -> tuple[str, ...]:
    """The completions that an environment allows in its current state.

    Raises:
        ConfigError: It does not say.
    """
    key = "allowed_completions" if "allowed_completions" in info else "admissible_actions"
    allowed = info.get(key)
    if not allowed:
        raise ConfigError(
            f"expected a list of completions in the environment's info[{key!r}] with "
            f"`constrain=True`, got {allowed}; have the environment list its admissible actions and "
            "the parser have `constraint`, or use constrain=False"
        )
    return tuple(allowed)
