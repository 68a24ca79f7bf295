"""`Rollout.stream`: what `collect` plays, without a barrier and only as far ahead as `capacity` allows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import pytest

from longstep.actions import ChoiceParser
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError
from longstep.policy import FunctionPolicy
from longstep.recording import RolloutBatch
from longstep.rollout import EpisodeGroup, Rollout
from longstep.types import Completion, GenerationRequest, StopReason, Task
from longstep.vector import EnvResult, GroupVectorEnv


class Walk(gymnasium.Env[Any, Any]):
    """Right until the end; the seed draws the length. `fall` raises."""

    action_names = ("left", "right", "fall")
    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Discrete(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.position, self.length = 0, int(self.np_random.integers(2, 6))
        self.num_left = 20
        return self.position, {}

    def step(self, action: int):
        if self.action_names[action] == "fall":
            raise RuntimeError("fell over")
        self.num_left -= 1
        self.position = max(0, self.position + (1 if action == 1 else -1))
        solved = self.position == self.length
        return self.position, float(solved), solved, self.num_left == 0, {"success": solved}


def make_env() -> LLMAgentEnv:
    return LLMAgentEnv(Walk(), parser=ChoiceParser())


def tasks(num_tasks: int) -> list[Task]:
    return [Task(env_id="walk", seed=seed) for seed in range(num_tasks)]


def wander(request: GenerationRequest) -> str:
    return "right" if request.seed % 3 else "left"


def right(request: GenerationRequest) -> str:
    return "right"


def contents(groups: Sequence[EpisodeGroup]) -> Any:
    """Everything but wall times, in order of the groups."""
    ordered = sorted(groups, key=lambda group: group.group_id)
    batch = RolloutBatch(trajectories=tuple(t for group in ordered for t in group.trajectories))
    return contents_of_batch(batch)


def contents_of_batch(batch: RolloutBatch) -> Any:
    columns = {name: column.tobytes() for name, column in batch.to_numpy().items()}
    texts = [
        (t.trajectory_id, t.group_id, t.member, t.stop_reason, t.error) for t in batch.trajectories
    ]
    ids = [step.completion.request_id for step in batch.rows]
    return columns, texts, ids


class LateEnvs(GroupVectorEnv):
    """Holds back the results of some slots until there is nothing else to give."""

    def __init__(self, num_envs: int, slow: Sequence[int]) -> None:
        super().__init__(make_env, num_envs)
        self.slow, self.held = set(slow), list[EnvResult]()

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> list[EnvResult]:
        self.held += super().recv()
        fast = [result for result in self.held if result.slot not in self.slow]
        given = fast or (self.held if timeout_s else [])
        self.held = [result for result in self.held if result not in given]
        return given


class Versioned(FunctionPolicy):
    """Stamps completions with a version that the test sets."""

    version = 0

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        return [replace(c, policy_version=self.version) for c in super().poll(timeout_s)]


@pytest.mark.parametrize("num_envs", [1, 5, 12, 40])
def test_a_stream_plays_what_collect_plays(num_envs: int) -> None:
    whole = Rollout(make_env, FunctionPolicy(wander), group_size=3).collect(tasks(6), iteration=4)
    rollout = Rollout(make_env, FunctionPolicy(wander), group_size=3, num_envs=num_envs)
    groups = list(rollout.stream(iter(tasks(6)), iteration=4))
    assert contents(groups) == contents_of_batch(whole)


def test_groups_come_in_the_order_in_which_they_end() -> None:
    envs = LateEnvs(4, slow=[0])
    stream = Rollout(envs, FunctionPolicy(right), group_size=2).stream(tasks(5))
    order = [group.group_id for group in stream]
    assert sorted(order) == list(range(5))
    assert order[0] != 0, "the group with the slow member came first"


def test_capacity_bounds_how_many_groups_have_started() -> None:
    allowed = 2
    taken: list[int] = []

    def stream_of_tasks() -> Any:
        for seed in itertools.count():
            taken.append(seed)
            yield Task(env_id="walk", seed=seed)

    rollout = Rollout(make_env, FunctionPolicy(wander), group_size=2, num_envs=16)
    with rollout.stream(stream_of_tasks(), capacity=lambda: allowed) as stream:
        ended: list[EpisodeGroup] = []
        for bound in (2, 3, 7):
            allowed = bound
            while len(ended) < bound:
                ended += stream.poll(1.0)
            assert stream.poll(0.05) == []
            assert stream.num_started == len(taken) == bound
    assert sorted(group.group_id for group in ended) == list(range(7))


def test_tasks_are_taken_only_when_a_slot_is_free() -> None:
    taken = 0

    def counted() -> Any:
        nonlocal taken
        for task in tasks(100):
            taken += 1
            yield task

    stream = Rollout(make_env, FunctionPolicy(wander), group_size=4, num_envs=6).stream(counted())
    for group in itertools.islice(iter(stream), 3):
        assert taken <= group.group_id + 4
    stream.close()


def test_a_failed_member_is_played_again_and_stays_in_its_group() -> None:
    def falls_once(request: GenerationRequest) -> str:
        return "fall" if "g1m0-" in request.trajectory_id else "right"

    rollout = Rollout(make_env, FunctionPolicy(falls_once), group_size=2)
    groups = sorted(rollout.stream(tasks(3)), key=lambda group: group.group_id)
    reasons = [t.stop_reason for t in groups[1].trajectories]
    ended = StopReason.TERMINATED
    assert reasons == [StopReason.ENV_FAILURE, ended, ended]
    assert [len(group.trajectories) for group in groups] == [2, 3, 2]


def test_a_group_of_nothing_but_failures_ends_too() -> None:
    rollout = Rollout(make_env, FunctionPolicy(lambda request: "fall"), group_size=2, max_rerolls=1)
    groups = list(rollout.stream(tasks(2)))
    assert [len(group.trajectories) for group in groups] == [4, 4]
    assert all(group.oldest_version is None for group in groups)


def test_each_trajectory_knows_the_oldest_version_that_made_it() -> None:
    policy = Versioned(right)
    envs = GroupVectorEnv(make_env, 2)
    found: list[tuple[int | None, int]] = []
    with Rollout(envs, policy, group_size=2).stream(tasks(4)) as stream:
        while not stream.is_over:
            groups = stream.poll(0.0)  # one turn: at most one step of each member
            policy.version += 1
            for group in groups:
                versions = [
                    s.completion.policy_version for t in group.trajectories for s in t.steps
                ]
                assert group.oldest_version == min(versions)
                assert max(versions) > min(versions)
                found.append((group.oldest_version, group.group_id))
    assert len(found) == 4
    assert [group_id for _, group_id in sorted(found)] == [0, 1, 2, 3]
    envs.close()


def test_a_closed_stream_withdraws_its_requests_and_leaves_everything_usable() -> None:
    policy = FunctionPolicy(wander)
    envs = GroupVectorEnv(make_env, 8)
    rollout = Rollout(envs, policy, group_size=2)
    stream = rollout.stream(itertools.cycle(tasks(3)))
    assert len(stream.poll(10.0)) >= 1
    stream.close()
    stream.close()
    assert stream.is_over
    assert list(stream) == []
    assert policy.poll(0.0) == []
    after = rollout.collect(tasks(4), iteration=9)
    fresh = Rollout(make_env, FunctionPolicy(wander), group_size=2).collect(tasks(4), iteration=9)
    assert contents_of_batch(after) == contents_of_batch(fresh)
    envs.close()


def test_leaving_the_loop_early_closes_the_stream() -> None:
    rollout = Rollout(make_env, FunctionPolicy(wander), group_size=2)
    stream = rollout.stream(itertools.cycle(tasks(3)))
    groups = iter(stream)
    next(groups)
    groups.close()  # type: ignore[attr-defined]
    assert stream.is_over


def test_a_policy_that_answers_late_leaves_poll_in_time() -> None:
    class Silent(FunctionPolicy):
        def poll(self, timeout_s: float) -> Sequence[Completion]:
            return []

    stream = Rollout(make_env, Silent(right), group_size=2).stream(tasks(2))
    assert stream.poll(0.05) == []
    assert not stream.is_over
    stream.close()


def test_the_order_of_answers_changes_no_trajectory() -> None:
    class Shuffled(FunctionPolicy):
        random = random.Random(0)

        def poll(self, timeout_s: float) -> Sequence[Completion]:
            self.random.shuffle(self._pending)
            later, self._pending = self._pending[2:], self._pending[:2]
            given = super().poll(timeout_s)
            self._pending = later
            return given

    streams = [
        Rollout(make_env, policy, group_size=3, num_envs=7).stream(tasks(6), iteration=1)
        for policy in (FunctionPolicy(wander), Shuffled(wander))
    ]
    straight, shuffled = (contents(list(stream)) for stream in streams)
    assert straight == shuffled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": 3}, "tasks"),
        ({"tasks": [], "capacity": 5}, "capacity"),
        ({"tasks": [], "iteration": -1}, "iteration"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], message: str) -> None:
    rollout = Rollout(make_env, FunctionPolicy(right), group_size=2)
    with pytest.raises(ConfigError, match=message):
        rollout.stream(**arguments)


def test_a_task_of_another_kind_is_named_and_closes_the_stream() -> None:
    rollout = Rollout(make_env, FunctionPolicy(right), group_size=2)
    stream = rollout.stream(["walk"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"tasks\[0\]"):
        stream.poll(1.0)
    assert stream.is_over
