"""Batches beside the updates: how far the rollout runs ahead, what is dropped, and how it ends."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

from longstep.actions import ChoiceParser
from longstep.env import LLMAgentEnv
from longstep.errors import EnvError, PolicyError
from longstep.policy import FunctionPolicy
from longstep.recording import RolloutBatch
from longstep.rollout import EpisodeGroup, Rollout
from longstep.types import Completion, GenerationRequest, StopReason, Task, Trajectory
from longstep.vector import GroupVectorEnv
from longstep_bindings.testing import wait_until
from longstep_trainers.sources import CollectSource, StreamSource


class Walk(gymnasium.Env[Any, Any]):
    """Right until the end; the seed draws the length. `fall` raises."""

    action_names = ("left", "right", "fall")
    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Discrete(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.position, self.length = 0, int(self.np_random.integers(2, 6))
        return self.position, {}

    def step(self, action: int):
        if self.action_names[action] == "fall":
            raise RuntimeError("fell over")
        self.position = max(0, self.position + (1 if action == 1 else -1))
        solved = self.position == self.length
        return self.position, float(solved), solved, False, {"success": solved}


def make_env() -> LLMAgentEnv:
    return LLMAgentEnv(Walk(), parser=ChoiceParser())


class Versioned(FunctionPolicy):
    """Stamps completions with a version that the test sets; answers `held` trajectories only when it is emptied."""

    def __init__(self, text: str = "right") -> None:
        super().__init__(lambda request: text)
        self.version = 0
        self.held: set[str] = set()

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        later = [r for r in self._pending if any(mark in r.request_id for mark in self.held)]
        self._pending = [r for r in self._pending if r not in later]
        given = [replace(c, policy_version=self.version) for c in super().poll(timeout_s)]
        self._pending += later
        if not given:
            time.sleep(min(timeout_s, 0.002))
        return given


def endless() -> Iterator[Task]:
    return (Task(env_id="walk", seed=seed) for seed in itertools.count())


class Rig:
    """A stream source on real environments, with the trainer's part played by the test."""

    def __init__(self, *, max_staleness: int, version: int = 0, text: str = "right") -> None:
        self.policy = Versioned(text)
        self.policy.version = version
        self.envs = GroupVectorEnv(make_env, 8)
        self.source = StreamSource(
            Rollout(self.envs, self.policy, group_size=2),
            endless(),
            groups_per_iteration=3,
            max_staleness=max_staleness,
            version=version,
            iteration=version,
        )

    def update(self) -> None:
        self.policy.version += 1
        self.source.advance(self.policy.version)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        self.envs.close()


def group_ids(batch: RolloutBatch) -> list[int]:
    return sorted({t.group_id for t in batch.trajectories})


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_no_sample_is_older_than_the_bound_and_every_group_is_used_once(max_staleness: int) -> None:
    seen: list[int] = []
    with Rig(max_staleness=max_staleness) as rig:
        for _ in range(8):
            batch, metrics = rig.source.next_batch()
            lags = [rig.policy.version - row.completion.policy_version for row in batch.rows]
            assert 0 <= max(lags) <= max_staleness
            assert metrics["async/staleness_max"] == max(lags)
            assert metrics["async/staleness_mean"] == pytest.approx(np.mean(lags))
            assert metrics["async/dropped_groups"] == 0
            assert len(group_ids(batch)) == 3
            seen += group_ids(batch)
            rig.update()
    assert len(seen) == len(set(seen)) == 24


def test_the_rollout_runs_ahead_by_the_bound_and_no_further() -> None:
    with Rig(max_staleness=1) as rig:
        rig.source.next_batch()
        wait_until(lambda: rig.source._num_started == 6)
        rig.update()
        wait_until(lambda: rig.source._num_started == 9)
        time.sleep(0.1)
        assert rig.source._num_started == 9


def test_a_batch_waits_for_the_slow_group_that_would_become_too_old() -> None:
    with Rig(max_staleness=1) as rig:
        rig.policy.held = {"g0m1-"}
        first, _ = rig.source.next_batch()
        assert 0 not in group_ids(first)
        rig.update()
        batches: list[RolloutBatch] = []
        waiter = threading.Thread(target=lambda: batches.append(rig.source.next_batch()[0]))
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive(), "the batch came without the group that is due"
        rig.policy.held = set()
        waiter.join(60.0)
        assert 0 in group_ids(batches[0])


def test_slow_groups_that_end_together_are_trained_on_and_not_dropped() -> None:
    slow = {f"g{group}m1-" for group in range(4)}  # more than one batch of them
    with Rig(max_staleness=2) as rig:
        rig.policy.held = slow
        for _ in range(2):
            batch, _ = rig.source.next_batch()
            assert not set(group_ids(batch)) & set(range(4))
            rig.update()
        rig.policy.held = set()
        batch, metrics = rig.source.next_batch()
        assert set(range(4)) <= set(group_ids(batch))
        assert metrics["async/staleness_max"] == 2
        for _ in range(3):
            rig.update()
            _, metrics = rig.source.next_batch()
            assert metrics["async/dropped_groups"] == 0


def test_groups_beyond_the_bound_are_dropped_and_counted_and_played_anew() -> None:
    with Rig(max_staleness=1) as rig:
        rig.source.next_batch()
        wait_until(lambda: len(rig.source._ended) == 3)
        for _ in range(2):  # two updates without a batch between them: more than the rule foresees
            rig.update()
        batch, metrics = rig.source.next_batch()
        assert metrics["async/dropped_groups"] == 3
        assert metrics["async/dropped_env_steps"] > 0
        assert metrics["async/staleness_max"] <= 1
        assert len(group_ids(batch)) == 3
        wait_until(lambda: rig.source._num_started == 3 * (2 + 1 + 1) + 3)


def test_after_a_resume_the_count_begins_with_the_restored_version() -> None:
    with Rig(max_staleness=1, version=40) as rig:
        batch, metrics = rig.source.next_batch()
        assert metrics["async/staleness_max"] == 0
        assert all(t.trajectory_id.startswith("i40g") for t in batch.trajectories)
        wait_until(lambda: rig.source._num_started == 6)
        time.sleep(0.05)
        assert rig.source._num_started == 6


def test_closing_ends_the_thread_while_trajectories_are_under_way() -> None:
    with Rig(max_staleness=1) as rig:
        rig.source.next_batch()
        rig.policy.held = {"g"}
        rig.update()
        rig.source.close()
        assert not rig.source._thread.is_alive()
        rig.source.close()
        assert rig.policy.poll(0.0) == [], "requests were left with the policy"


def test_a_source_that_never_began_closes() -> None:
    with Rig(max_staleness=1) as rig:
        assert rig.source._thread.ident is None


def test_what_fails_in_the_thread_is_raised_where_the_batch_is_asked_for() -> None:
    def broken() -> Iterator[Task]:
        yield Task(env_id="walk", seed=0)
        raise RuntimeError("no more tasks to be had")

    envs = GroupVectorEnv(make_env, 4)
    source = StreamSource(
        Rollout(envs, Versioned(), group_size=2),
        broken(),
        groups_per_iteration=3,
        max_staleness=1,
        version=0,
        iteration=0,
    )
    with pytest.raises(RuntimeError, match="no more tasks"):
        source.next_batch()
    source.close()
    envs.close()


def test_nothing_but_failures_is_an_error_that_says_what_failed() -> None:
    with Rig(max_staleness=1, text="fall") as rig, pytest.raises(EnvError, match="fell over"):
        rig.source.next_batch()


def test_nothing_but_refusals_of_the_policy_are_the_policys_error() -> None:
    def refuses(request: GenerationRequest) -> str:
        raise RuntimeError("out of memory")

    with closing(GroupVectorEnv(make_env, 4)) as envs:
        source = CollectSource(
            Rollout(envs, FunctionPolicy(refuses), group_size=2),
            endless(),  # type: ignore[arg-type]
            1,
            iteration=0,
        )
        with pytest.raises(PolicyError, match="out of memory"):
            source.next_batch()


def test_failed_members_age_nothing() -> None:
    failed = Trajectory(
        trajectory_id="a",
        task=Task(env_id="walk", seed=0),
        group_id=0,
        member=0,
        steps=(),
        stop_reason=StopReason.ENV_FAILURE,
        success=False,
    )
    group = EpisodeGroup(group_id=0, task=failed.task, trajectories=(failed,))
    assert group.oldest_version is None


def test_without_staleness_each_batch_is_one_collect() -> None:
    def walk(request: GenerationRequest) -> str:
        return "right" if request.seed % 3 else "left"

    rollouts = [Rollout(make_env, FunctionPolicy(walk), group_size=2) for _ in range(2)]
    source = CollectSource(rollouts[0], endless(), 3, iteration=5)  # type: ignore[arg-type]
    tasks = endless()
    for iteration in (5, 6):
        batch, metrics = source.next_batch()
        own = rollouts[1].collect(itertools.islice(tasks, 3), iteration=iteration)
        assert [t.trajectory_id for t in batch.trajectories] == [
            t.trajectory_id for t in own.trajectories
        ]
        assert batch.to_numpy()["rewards"].tobytes() == own.to_numpy()["rewards"].tobytes()
        assert metrics == {}
        source.advance(iteration)
    source.close()
