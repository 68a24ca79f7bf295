"""What a rollout gives: trajectories, their steps as training rows, columns of arrays, numbers to watch, and a file.

Words: a *usable* trajectory did not fail; a *row* is one step of a usable trajectory. Rows come trajectory by
trajectory in order of time. Failed trajectories stay readable and are counted, and are in no other statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from longstep.arguments import check_path
from longstep.errors import ConfigError, DataError
from longstep.state_key import KEY_SIZE_BYTES
from longstep.types import Completion, StepRecord, StopReason, Trajectory

__all__ = ["RolloutBatch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutBatch:
    """The trajectories of one `Rollout.collect`, ordered by group, member and attempt, or of groups of a stream.

    A batch equals itself alone: two of them hold the wall times of two rollouts. Compare columns of `to_numpy`.

    >>> RolloutBatch(trajectories=()).summary()["success_rate"]
    0.0
    """

    trajectories: tuple[Trajectory, ...]
    """All of them, failures too."""
    rows: tuple[StepRecord, ...] = field(init=False, repr=False)
    """Steps of usable trajectories, trajectory by trajectory in order of time."""

    def __post_init__(self) -> None:
        """Gather the rows."""
        given: Any = self.trajectories
        if not isinstance(given, tuple):
            raise ConfigError(
                f"expected a tuple of Trajectory as `trajectories`, got {given!r:.100}"
            )
        for index, trajectory in enumerate(cast("tuple[Any, ...]", given)):
            if not isinstance(trajectory, Trajectory):
                raise ConfigError(
                    f"expected a Trajectory as `trajectories[{index}]`, got {trajectory!r:.100}"
                )
        rows = tuple(step for trajectory in self.usable for step in trajectory.steps)
        object.__setattr__(self, "rows", rows)

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """Trajectories that did not fail."""
        return tuple(t for t in self.trajectories if not t.stop_reason.is_failure)

    @property
    def errors(self) -> tuple[str, ...]:
        """One line for each failed trajectory: its id and what failed."""
        failed = (t for t in self.trajectories if t.stop_reason.is_failure)
        return tuple(f"{t.trajectory_id}: {t.error or t.stop_reason}" for t in failed)

    def to_numpy(self) -> dict[str, NDArray[Any]]:
        """Columns of arrays with N rows, in the order of `rows`.

        Returns:
            rewards float32[N], raw_rewards float32[N], trajectory_ids int64[N] (index into `trajectories`), group_ids
            int64[N], members int32[N], state_keys V16[N], steps int32[N], valid bool[N], terminated bool[N], truncated
            bool[N], policy_versions int32[N]; the ids of row i are prompt_token_ids[prompt_offsets[i] :
            prompt_offsets[i + 1]] (int32, int64), likewise completion_token_ids with completion_offsets; logprobs
            float32, one for each completion token. When any completion was constrained, also allowed_token_ids int32
            and allowed_offsets int64, one range for each completion token; an empty range stands for no constraint.

            The last row of a trajectory has `truncated` when the value of the state behind it should follow
            (`StopReason.bootstraps`), and `terminated` otherwise.
        """
        indices = [i for i, t in enumerate(self.trajectories) if not t.stop_reason.is_failure]
        counts = [len(self.trajectories[i].steps) for i in indices]
        groups = [self.trajectories[i].group_id for i in indices]
        members = [self.trajectories[i].member for i in indices]
        return {
            "trajectory_ids": np.repeat(np.array(indices, dtype=np.int64), counts),
            "group_ids": np.repeat(np.array(groups, dtype=np.int64), counts),
            "members": np.repeat(np.array(members, dtype=np.int32), counts),
            **step_columns(self.rows),
            **token_columns(self.rows),
        }

    def summary(self) -> dict[str, float]:
        """Numbers to watch.

        Returns:
            num_trajectories (usable), num_failures; success_rate, return_mean (raw rewards) and episode_length_mean over
            usable trajectories; invalid_action_rate over rows; env_steps and generated_tokens, all that were spent,
            failures included; loss_tokens, completion tokens in rows; stop/REASON for every `StopReason`, its share of
            all trajectories. A rate or mean over nothing is 0.0.
        """
        usable, rows = self.usable, self.rows
        steps = [step for t in self.trajectories for step in t.steps]
        numbers = {
            "num_trajectories": float(len(usable)),
            "num_failures": float(len(self.trajectories) - len(usable)),
            "success_rate": _mean([float(t.success) for t in usable]),
            "return_mean": _mean([t.episode_return for t in usable]),
            "episode_length_mean": _mean([float(t.num_steps) for t in usable]),
            "invalid_action_rate": _mean([float(not step.action.valid) for step in rows]),
            "env_steps": float(len(steps)),
            "generated_tokens": float(sum(len(step.completion.token_ids) for step in steps)),
            "loss_tokens": float(sum(len(step.completion.token_ids) for step in rows)),
        }
        for reason in StopReason:
            shares = [float(t.stop_reason == reason) for t in self.trajectories]
            numbers[f"stop/{reason}"] = _mean(shares)
        return numbers

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything into one file: a NumPy `.npz` archive with the texts as JSON lines in it; no pickle.

        The file appears whole or not at all. `np.load(path)` reads the arrays without longstep.

        Raises:
            UnsupportedTypeError: An observation or a task's option has a type with no JSON or array form.
        """
        from longstep.recording_file import write_batch

        check_path("path", path)
        write_batch(self.trajectories, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> RolloutBatch:
        """What `save` wrote.

        Raises:
            DataError: The file is not one of `save`, or is damaged.
        """
        from longstep.recording_file import read_trajectories

        check_path("path", path)
        return cls(trajectories=read_trajectories(path))


def step_columns(steps: Sequence[StepRecord]) -> dict[str, NDArray[Any]]:
    """One array for each numeric field of the steps, in their order."""
    for row, step in enumerate(steps):
        if len(step.state_key) != KEY_SIZE_BYTES:
            raise DataError(
                f"expected {KEY_SIZE_BYTES} bytes as `state_key`, got {len(step.state_key)} at row {row}; "
                "hash the observation with longstep.state_key.state_key"
            )
    return {
        "rewards": np.array([step.reward for step in steps], dtype=np.float32),
        "raw_rewards": np.array([step.raw_reward for step in steps], dtype=np.float32),
        "state_keys": np.frombuffer(b"".join(step.state_key for step in steps), dtype="V16").copy(),
        "steps": np.array([step.step for step in steps], dtype=np.int32),
        "valid": np.array([step.action.valid for step in steps], dtype=np.bool_),
        "terminated": np.array([step.terminated for step in steps], dtype=np.bool_),
        "truncated": np.array([step.truncated for step in steps], dtype=np.bool_),
        "policy_versions": np.array([s.completion.policy_version for s in steps], dtype=np.int32),
    }


def token_columns(steps: Sequence[StepRecord]) -> dict[str, NDArray[Any]]:
    """Token ids, offsets and log-probabilities of the steps, concatenated in their order."""
    completions = [step.completion for step in steps]
    prompts = [completion.prompt_token_ids for completion in completions]
    sampled = [completion.token_ids for completion in completions]
    columns: dict[str, NDArray[Any]] = {
        "prompt_token_ids": _concatenate(prompts, np.int32),
        "prompt_offsets": _offsets(prompts),
        "completion_token_ids": _concatenate(sampled, np.int32),
        "completion_offsets": _offsets(sampled),
        "logprobs": _concatenate([completion.logprobs for completion in completions], np.float32),
    }
    if any(completion.allowed_token_ids is not None for completion in completions):
        allowed = [ids for completion in completions for ids in _allowed_positions(completion)]
        columns["allowed_token_ids"] = _concatenate(allowed, np.int32)
        columns["allowed_offsets"] = _offsets(allowed)
    return columns


def _allowed_positions(completion: Completion) -> Sequence[NDArray[np.int32]]:
    """The allowed ids at each sampled position; empty arrays when the completion was not constrained."""
    if completion.allowed_token_ids is not None:
        return completion.allowed_token_ids
    return [np.empty(0, dtype=np.int32)] * len(completion.token_ids)


def _concatenate(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if not parts:
        return np.empty(0, dtype=dtype)
    return np.concatenate(parts).astype(dtype, copy=False)


def _offsets(parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return offsets


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
