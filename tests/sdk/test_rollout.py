"""`Rollout.collect`: every member once, whatever happens to the others, and the same bytes whatever the order."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

import longstep
from longstep.actions import ChoiceParser
from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError
from longstep.policy import EnginePolicy, FunctionPolicy
from longstep.recording import RolloutBatch
from longstep.rollout import Rollout
from longstep.types import Completion, FinishReason, GenerationRequest, StopReason, Task
from longstep.vector import EnvCommand, EnvResult, GroupVectorEnv

NAMES = ("left", "right", "raise", "nan", "interrupt")


class Corridor(gymnasium.Env[Any, Any]):
    """Walk right to the end; the seed draws the length. The other actions do what they say."""

    action_names = NAMES
    action_space = gymnasium.spaces.Discrete(len(NAMES))
    observation_space = gymnasium.spaces.Discrete(100)
    num_stepped = 0
    num_reset = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        type(self).num_reset += 1
        if options and options.get("broken"):
            raise RuntimeError("broken on request")
        self.position, self.length = 0, int(self.np_random.integers(2, 6))
        self.num_left = 20
        return self.position, {}

    def step(self, action: int):
        name = NAMES[action]
        type(self).num_stepped += 1
        if name == "raise":
            raise RuntimeError("fell over")
        if name == "interrupt":
            signal.raise_signal(signal.SIGINT)
        self.num_left -= 1
        self.position = max(0, self.position + (1 if name == "right" else -1))
        solved = self.position == self.length
        reward = float("nan") if name == "nan" else float(solved)
        return self.position, reward, solved, self.num_left == 0, {"success": solved}


def make_env() -> LLMAgentEnv:
    return LLMAgentEnv(Corridor(), parser=ChoiceParser())


def tasks(num_tasks: int, **options: Any) -> list[Task]:
    return [Task(env_id="corridor", seed=s, options=options or None) for s in range(num_tasks)]


def walk(request: GenerationRequest) -> str:
    """A random player that depends on nothing but the request."""
    return "right" if request.seed % 3 else "left"


def right(request: GenerationRequest) -> str:
    return "right"


def contents(batch: RolloutBatch) -> Any:
    """Everything in a batch but wall times."""
    columns = {name: column.tobytes() for name, column in batch.to_numpy().items()}
    texts = [(t.trajectory_id, t.stop_reason, t.success, t.error) for t in batch.trajectories]
    steps = [
        (s.completion.request_id, s.prompt, s.completion.text, s.action, s.observation)
        for t in batch.trajectories
        for s in t.steps
    ]
    return columns, texts, steps


class Counting:
    """A function that counts how often each request came."""

    def __init__(self, function: Callable[[GenerationRequest], str]) -> None:
        self.function = function
        self.seen: Counter[str] = Counter()
        self.requests: list[GenerationRequest] = []

    def __call__(self, request: GenerationRequest) -> str:
        self.seen[request.request_id] += 1
        self.requests.append(request)
        return self.function(request)


class OutOfOrderEnvs(GroupVectorEnv):
    """Gives results a few at a time and in random order; those of `slow` slots only when nothing else is there."""

    def __init__(self, num_envs: int, seed: int, slow: Iterable[int] = ()) -> None:
        super().__init__(make_env, num_envs)
        self.random = random.Random(seed)
        self.slow = set(slow)
        self.held: list[EnvResult] = []

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> list[EnvResult]:
        self.held += super().recv()
        self.random.shuffle(self.held)
        fast = [result for result in self.held if result.slot not in self.slow]
        count = max(min_ready, self.random.randrange(3))
        given = (fast or (self.held if timeout_s else []))[:count]
        self.held = [result for result in self.held if result not in given]
        return given


class OutOfOrderPolicy(FunctionPolicy):
    """Answers a few requests at a time and in random order."""

    def __init__(self, function: Callable[[GenerationRequest], str], seed: int) -> None:
        super().__init__(function)
        self.random = random.Random(seed)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self.random.shuffle(self._pending)
        count = self.random.randrange(1, 4)
        later, self._pending = self._pending[count:], self._pending[:count]
        given = super().poll(timeout_s)
        self._pending = later
        return given


def test_the_number_of_environments_changes_nothing() -> None:
    batches = [
        Rollout(make_env, FunctionPolicy(walk), group_size=3, num_envs=n).collect(tasks(5))
        for n in (1, 2, 7, 15, 40)
    ]
    assert batches[0].to_numpy()["rewards"].sum() > 0
    for batch in batches[1:]:
        assert contents(batch) == contents(batches[0])


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_changes_nothing(seed: int) -> None:
    straight = Rollout(make_env, FunctionPolicy(walk), group_size=4).collect(tasks(4))
    envs, policy = OutOfOrderEnvs(6, seed), OutOfOrderPolicy(walk, seed)
    shuffled = Rollout(envs, policy, group_size=4).collect(tasks(4))
    assert contents(shuffled) == contents(straight)


@pytest.mark.parametrize("num_envs", [1, 5, 12, 30])
def test_each_member_is_played_once_and_each_step_asked_for_once(num_envs: int) -> None:
    function = Counting(walk)
    before = Corridor.num_stepped, Corridor.num_reset
    batch = Rollout(make_env, FunctionPolicy(function), group_size=3, num_envs=num_envs).collect(
        tasks(4)
    )
    places = [(t.group_id, t.member) for t in batch.trajectories]
    assert places == [(group, member) for group in range(4) for member in range(3)]
    assert [t.task.seed for t in batch.trajectories] == [group for group, _ in places]
    assert Corridor.num_reset - before[1] == 12
    assert Corridor.num_stepped - before[0] == len(batch.rows) == len(function.requests)
    assert set(function.seen.values()) == {1}
    assert set(function.seen) == {step.completion.request_id for step in batch.rows}


def test_the_same_task_twice_is_two_groups_that_are_sampled_apart() -> None:
    task = tasks(1) * 2
    batch = Rollout(make_env, FunctionPolicy(walk), group_size=8).collect(task)
    texts = [[s.completion.text for s in t.steps] for t in batch.trajectories]
    assert [t.group_id for t in batch.trajectories] == [0] * 8 + [1] * 8
    assert texts[:8] != texts[8:]


def test_members_of_a_group_are_sampled_apart_and_start_alike() -> None:
    function = Counting(walk)
    batch = Rollout(make_env, FunctionPolicy(function), group_size=8).collect(tasks(2))
    assert len({request.seed for request in function.requests}) == len(function.requests)
    assert all(0 <= request.seed < 2**63 for request in function.requests)
    for group in range(2):
        first = {t.steps[0].prompt.text for t in batch.trajectories if t.group_id == group}
        assert len(first) == 1


def test_iterations_differ_and_a_given_iteration_can_be_repeated() -> None:
    rollout = Rollout(make_env, FunctionPolicy(walk), group_size=4)
    first, second = rollout.collect(tasks(3)), rollout.collect(tasks(3))
    assert contents(first) != contents(second)
    resumed = Rollout(make_env, FunctionPolicy(walk), group_size=4)
    assert contents(resumed.collect(tasks(3), iteration=1)) == contents(second)
    assert contents(resumed.collect(tasks(3))) == contents(rollout.collect(tasks(3)))


def test_the_rollouts_seed_changes_the_samples() -> None:
    batches = [
        Rollout(make_env, FunctionPolicy(walk), group_size=4, seed=seed).collect(tasks(3))
        for seed in (1, 2)
    ]
    assert contents(batches[0]) != contents(batches[1])


def test_no_step_waits_for_a_slow_member() -> None:
    order: list[str] = []
    envs = OutOfOrderEnvs(4, seed=0, slow=[0])
    rollout = Rollout(
        envs, FunctionPolicy(right), group_size=4, on_step=lambda name, step: order.append(name)
    )
    batch = rollout.collect(tasks(2))
    slow = batch.trajectories[0]
    assert slow.num_steps > 1
    assert order[-slow.num_steps :] == [slow.trajectory_id] * slow.num_steps
    assert len(set(order)) == len(batch.usable) == 8


class BatchSizes:
    """An engine that says `right` and remembers how many requests each call had."""

    policy_version = 3

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.sizes.append(len(requests))
        return [
            Completion(
                request_id=request.request_id,
                prompt_token_ids=np.arange(5, dtype=np.int32),
                token_ids=np.array([7, 1], dtype=np.int32),
                logprobs=np.array([-0.5, -0.25], dtype=np.float32),
                text="right",
                finish_reason=FinishReason.STOP,
                policy_version=self.policy_version,
            )
            for request in requests
        ]


def test_everything_that_is_ready_goes_into_one_engine_call() -> None:
    engine = BatchSizes()
    batch = Rollout(make_env, EnginePolicy(engine), group_size=8, num_envs=16).collect(tasks(6))
    lengths = [t.num_steps for t in batch.trajectories]
    assert engine.sizes[0] == 16
    assert sum(engine.sizes) == sum(lengths)
    full = [size for size in engine.sizes if size == 16]
    assert len(full) >= len(engine.sizes) - max(lengths)


def test_policy_version_and_ids_reach_the_columns() -> None:
    batch = Rollout(make_env, EnginePolicy(BatchSizes()), group_size=2).collect(tasks(2))
    columns = batch.to_numpy()
    assert set(columns["policy_versions"].tolist()) == {3}
    assert columns["completion_token_ids"].tolist() == [7, 1] * len(batch.rows)
    assert columns["prompt_offsets"].tolist() == list(range(0, 5 * len(batch.rows) + 1, 5))


def test_a_policy_without_the_promised_logprobs_fails_and_is_not_trained_on() -> None:
    class Short(BatchSizes):
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
            from dataclasses import replace

            return [replace(c, logprobs=c.logprobs[:1]) for c in super().generate(requests)]

    batch = Rollout(make_env, EnginePolicy(Short()), group_size=1).collect(tasks(1))
    assert batch.rows == ()
    assert "expected 2 logprobs from the policy, got 1" in batch.errors[0]


# -- why trajectories stop --------------------------------------------------------------------------------------------


def only(batch: RolloutBatch) -> Any:
    (trajectory,) = batch.trajectories
    return trajectory


def play_one(function: Callable[[GenerationRequest], str] = right, **settings: Any) -> Any:
    rollout = Rollout(make_env, FunctionPolicy(function), group_size=1, **settings)
    return only(rollout.collect(tasks(1)))


def last_flags(trajectory: Any) -> tuple[bool, bool]:
    return trajectory.steps[-1].terminated, trajectory.steps[-1].truncated


def test_a_solved_task_terminates() -> None:
    trajectory = play_one()
    assert trajectory.stop_reason is StopReason.TERMINATED
    assert trajectory.success
    assert trajectory.episode_return == 1.0
    assert last_flags(trajectory) == (True, False)
    assert [s.observation for s in trajectory.steps] == list(range(trajectory.num_steps))


def test_an_environments_own_cut_is_a_truncation() -> None:
    trajectory = play_one(lambda request: "left")
    assert trajectory.stop_reason is StopReason.TRUNCATED
    assert trajectory.num_steps == 20
    assert last_flags(trajectory) == (False, True)


def test_max_steps_is_a_time_limit_that_bootstraps() -> None:
    trajectory = play_one(lambda request: "left", max_steps=3)
    assert trajectory.stop_reason is StopReason.TIME_LIMIT
    assert trajectory.num_steps == 3
    assert last_flags(trajectory) == (False, True)
    assert not trajectory.success


def test_the_wrappers_max_steps_is_a_time_limit_too() -> None:
    rollout = Rollout(
        lambda: LLMAgentEnv(Corridor(), max_steps=2), FunctionPolicy(lambda r: "left"), group_size=1
    )
    trajectory = only(rollout.collect(tasks(1)))
    assert trajectory.stop_reason is StopReason.TIME_LIMIT
    assert trajectory.num_steps == 2


def test_more_invalid_actions_in_a_row_than_allowed_end_the_trajectory() -> None:
    trajectory = play_one(lambda request: "fly", max_invalid_in_row=2)
    assert trajectory.stop_reason is StopReason.INVALID_ACTION
    assert [step.action.valid for step in trajectory.steps] == [False] * 3
    assert last_flags(trajectory) == (True, False)


def test_invalid_actions_apart_from_each_other_do_not_end_it() -> None:
    def every_other(request: GenerationRequest) -> str:
        return "fly" if int(request.request_id.rpartition(":")[2]) % 2 else "right"

    trajectory = play_one(every_other, max_invalid_in_row=1)
    assert trajectory.stop_reason is StopReason.TERMINATED
    assert not all(step.action.valid for step in trajectory.steps)


def test_the_token_allowance_ends_a_trajectory() -> None:
    rollout = Rollout(make_env, EnginePolicy(BatchSizes()), group_size=1, max_total_tokens=8)
    trajectory = only(rollout.collect([Task(env_id="corridor", seed=2)]))
    assert trajectory.stop_reason is StopReason.BUDGET
    assert trajectory.num_steps == 2  # 7 tokens a step
    assert last_flags(trajectory) == (False, True)


# -- what goes to the policy ------------------------------------------------------------------------------------------


def test_settings_of_sampling_reach_the_requests() -> None:
    function = Counting(right)
    settings: dict[str, Any] = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ["\n"]}
    Rollout(make_env, FunctionPolicy(function), group_size=1, **settings).collect(tasks(1))
    request = function.requests[0]
    assert (request.max_tokens, request.temperature, request.top_p) == (9, 0.5, 0.9)
    assert request.stop == ("\n",)
    assert request.allowed is None
    assert request.trajectory_id == request.request_id.rpartition(":")[0]


def test_constrain_hands_over_the_allowed_completions() -> None:
    function = Counting(right)
    Rollout(make_env, FunctionPolicy(function), group_size=1, constrain=True).collect(tasks(1))
    assert {request.allowed for request in function.requests} == {NAMES}


def test_constrain_without_admissible_actions_is_a_wrong_call() -> None:
    class Free(Corridor):
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    rollout = Rollout(
        lambda: LLMAgentEnv(Free()), FunctionPolicy(right), group_size=1, constrain=True
    )
    with pytest.raises(ConfigError, match="constrain=True"):
        rollout.collect(tasks(1))


def test_an_environment_that_is_not_wrapped_is_a_wrong_call() -> None:
    rollout = Rollout(Corridor, FunctionPolicy(right), group_size=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"wrap the environment: LLMAgentEnv\(env\)"):
        rollout.collect(tasks(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "`group_size` of at least 1, got 0"),
        ({"group_size": -4}, "`group_size` of at least 1, got -4"),
        ({"max_steps": 0}, "`max_steps` of at least 1 or None, got 0"),
        ({"max_tokens": 0}, "`max_tokens`"),
        ({"temperature": -1.0}, "finite `temperature` of at least 0"),
        ({"temperature": float("nan")}, "finite `temperature` of at least 0"),
        ({"top_p": 0.0}, "`top_p` in"),
        ({"max_rerolls": -1}, "`max_rerolls` of at least 0"),
        ({"failed_groups": "ignore"}, "`reroll` or `shrink`, got `ignore`"),
        ({"policy_timeout_s": 0.0}, "`policy_timeout_s` above 0 or None"),
        ({"num_envs": 0}, "`num_envs` of at least 1"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rollout(make_env, FunctionPolicy(right), **{"group_size": 1, **settings})


def test_env_kwargs_beside_ready_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="no `env_kwargs` beside a VectorEnv"):
        Rollout(GroupVectorEnv(make_env, 1), FunctionPolicy(right), group_size=1, env_kwargs={})


def test_no_tasks_give_an_empty_batch() -> None:
    batch = Rollout(make_env, FunctionPolicy(right), group_size=2).collect([])
    assert batch.trajectories == batch.rows == ()
    assert len(batch.to_numpy()["rewards"]) == 0


# -- failures ---------------------------------------------------------------------------------------------------------


def sometimes(action: str) -> Callable[[GenerationRequest], str]:
    return lambda request: action if request.seed % 11 == 0 else walk(request)


@pytest.mark.parametrize("action", ["raise", "nan"])
def test_a_failed_member_is_played_again_and_the_others_are_untouched(action: str) -> None:
    good = Rollout(make_env, FunctionPolicy(walk), group_size=6).collect(tasks(6))
    settings: dict[str, Any] = {"group_size": 6, "max_rerolls": 20}
    batch = Rollout(make_env, FunctionPolicy(sometimes(action)), **settings).collect(tasks(6))
    failed = [t for t in batch.trajectories if t.stop_reason is StopReason.ENV_FAILURE]
    assert failed
    assert all("fell over" in (t.error or "") or "finite" in (t.error or "") for t in failed)
    assert Counter(t.group_id for t in batch.usable) == dict.fromkeys(range(6), 6)
    assert (
        len(batch.trajectories)
        == 36 + len(failed)
        == len({t.trajectory_id for t in batch.trajectories})
    )
    assert len(batch.rows) == sum(t.num_steps for t in batch.usable)
    usable = {t.trajectory_id: [s.action for s in t.steps] for t in batch.usable}
    same = [t for t in good.trajectories if t.trajectory_id in usable]
    failed_at_once = {(t.group_id, t.member) for t in failed}
    assert len(same) == 36 - len(failed_at_once) > 0
    assert all([s.action for s in t.steps] == usable[t.trajectory_id] for t in same)


def test_failures_do_not_depend_on_the_number_of_environments() -> None:
    policy = FunctionPolicy(sometimes("raise"))
    batches = [
        Rollout(make_env, policy, group_size=4, num_envs=n).collect(tasks(6)) for n in (1, 5, 24)
    ]
    assert batches[0].errors
    assert contents(batches[0]) == contents(batches[1]) == contents(batches[2])


def test_groups_shrink_when_asked_to() -> None:
    settings: dict[str, Any] = {"group_size": 6, "failed_groups": "shrink"}
    batch = Rollout(make_env, FunctionPolicy(sometimes("raise")), **settings).collect(tasks(6))
    assert len(batch.trajectories) == 36
    assert 0 < len(batch.usable) < 36
    assert len(batch.errors) == 36 - len(batch.usable)


def test_a_task_whose_reset_always_fails_costs_nobody_else_anything() -> None:
    broken = Task(env_id="corridor", seed=1, options={"broken": True})
    mixed = [*tasks(2), broken, *tasks(2)]
    batch = Rollout(make_env, FunctionPolicy(walk), group_size=2, max_rerolls=1).collect(mixed)
    assert Counter(t.group_id for t in batch.usable) == {0: 2, 1: 2, 3: 2, 4: 2}
    failed = [t for t in batch.trajectories if t.group_id == 2]
    assert [(t.member, t.num_steps) for t in failed] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert all("RuntimeError: broken on request" in error for error in batch.errors)


def test_when_everything_fails_there_are_no_rows_and_the_errors_are_listed() -> None:
    batch = Rollout(make_env, FunctionPolicy(right), group_size=2).collect(tasks(2, broken=True))
    assert batch.rows == ()
    assert len(batch.errors) == 2 * 2 * 3
    assert batch.summary()["num_failures"] == 12.0
    assert {name: len(column) for name, column in batch.to_numpy().items()}["rewards"] == 0


def test_a_request_that_the_policy_cannot_answer_fails_its_trajectory_only() -> None:
    def picky(request: GenerationRequest) -> str:
        if request.seed % 13 == 0:
            raise ValueError("cannot read this")
        return walk(request)

    batch = Rollout(make_env, FunctionPolicy(picky), group_size=6, max_rerolls=20).collect(tasks(6))
    failed = [t for t in batch.trajectories if t.stop_reason is StopReason.POLICY_FAILURE]
    assert failed
    assert all("cannot read this" in (t.error or "") for t in failed)
    assert len(batch.usable) == 36


class Crashing(FunctionPolicy):
    """Loses everything it has at its third poll, as an engine out of memory would."""

    num_polls = 0

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self.num_polls += 1
        given = super().poll(timeout_s)
        if self.num_polls == 3:
            raise RuntimeError("out of memory")
        return given


def test_a_poll_that_raises_fails_what_was_pending_and_the_rest_goes_on() -> None:
    batch = Rollout(make_env, Crashing(walk), group_size=4, num_envs=8).collect(tasks(4))
    assert 0 < len(batch.errors) <= 8
    assert all("poll raised RuntimeError: out of memory" in error for error in batch.errors)
    assert len(batch.usable) == 16


class Silent(FunctionPolicy):
    """Never answers the requests of group 1."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit([r for r in requests if "g1m" not in r.request_id])


def test_a_policy_that_never_answers_is_given_up_after_the_deadline() -> None:
    settings: dict[str, Any] = {"group_size": 2, "policy_timeout_s": 0.05, "max_rerolls": 1}
    batch = Rollout(make_env, Silent(walk), **settings).collect(tasks(3))
    failed = [t for t in batch.trajectories if t.stop_reason.is_failure]
    assert [(t.group_id, t.member) for t in failed] == [(1, 0), (1, 0), (1, 1), (1, 1)]
    assert all("no completion" in e or "gave none" in e for e in batch.errors)
    assert Counter(t.group_id for t in batch.usable) == {0: 2, 2: 2}


def test_an_observer_that_raises_is_told_of_and_loses_nothing() -> None:
    def observer(name: str, step: Any) -> None:
        raise ValueError("full disk")

    rollout = Rollout(make_env, FunctionPolicy(walk), group_size=2, on_step=observer)
    with pytest.warns(RuntimeWarning, match="on_step raised ValueError: full disk"):
        batch = rollout.collect(tasks(2))
    assert len(batch.usable) == 4


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


class Interrupting:
    """A function during whose n-th call Ctrl-C is pressed; `where` says in which part."""

    def __init__(self, where: str, num_calls: int) -> None:
        self.where, self.left = where, num_calls

    def __call__(self, request: GenerationRequest) -> str:
        self.left -= 1
        if self.left == 0 and self.where == "policy":
            signal.raise_signal(signal.SIGINT)
        return "interrupt" if self.left == 0 else walk(request)


@pytest.mark.parametrize("where", ["policy", "environment"])
@pytest.mark.parametrize("num_calls", [1, 5, 23])
def test_after_ctrl_c_the_environments_and_the_policy_can_be_used(
    where: str, num_calls: int
) -> None:
    envs = GroupVectorEnv(make_env, 4)
    function = Interrupting(where, num_calls)
    policy = FunctionPolicy(function)
    rollout = Rollout(envs, policy, group_size=4)
    with pytest.raises(KeyboardInterrupt):
        rollout.collect(tasks(4))
    again = rollout.collect(tasks(4), iteration=0)
    assert envs.recv(timeout_s=0.0) == []
    clean = Rollout(make_env, FunctionPolicy(walk), group_size=4).collect(tasks(4))
    assert contents(again) == contents(clean)


class LateEnvs(GroupVectorEnv):
    """Holds back all results while `held` is set, as a remote environment that is slow would."""

    is_holding = False

    def recv(self, min_ready: int = 1, timeout_s: float | None = None) -> list[EnvResult]:
        if self.is_holding:
            self.is_holding = False
            raise KeyboardInterrupt
        return super().recv(min_ready, timeout_s)


def test_commands_under_way_at_ctrl_c_are_drained() -> None:
    envs = LateEnvs(make_env, 4)
    rollout = Rollout(envs, FunctionPolicy(walk), group_size=4)
    envs.is_holding = True
    with pytest.raises(KeyboardInterrupt):
        rollout.collect(tasks(2))
    envs.send([EnvCommand(slot=0, command_id=0, task=tasks(1)[0])])
    assert [result.command_id for result in envs.recv()] == [0]


# -- the real world and a real engine ---------------------------------------------------------------------------------


def test_keydoor_is_played_by_chance_and_repeats_exactly() -> None:
    panel = longstep.tasks.panel("longstep/KeyDoor-v0", "eval", 6)
    with Rollout(
        panel.env_id, FunctionPolicy(chance), group_size=4, num_envs=5, constrain=True
    ) as rollout:
        first = rollout.collect(panel, iteration=0)
        second = rollout.collect(panel, iteration=0)
    assert contents(first) == contents(second)
    assert [t.task for t in first.trajectories[::4]] == list(panel)
    summary = first.summary()
    assert summary["invalid_action_rate"] == 0.0
    assert summary["num_trajectories"] == 24.0
    assert 0 < len(set(first.to_numpy()["state_keys"].tolist())) < len(first.rows)


def chance(request: GenerationRequest) -> str:
    assert request.allowed is not None
    return request.allowed[request.seed % len(request.allowed)]


def test_a_real_engine_gives_the_same_tokens_whatever_the_number_of_environments() -> None:
    pytest.importorskip("torch")
    from longstep_bindings.engines.transformers_engine import TransformersEngine
    from longstep_trainers.model import build_embedded

    panel = longstep.tasks.panel("longstep/KeyDoor-v0", "eval", 3)
    env = longstep.make(panel.env_id)
    prompts = [env.reset(seed=task.seed)[0] for task in panel]
    model, tokenizer = build_embedded(prompts, hidden_size=32, num_layers=1)
    policy = EnginePolicy(TransformersEngine(model, tokenizer))
    batches = [
        Rollout(
            panel.env_id,
            policy,
            group_size=2,
            num_envs=n,
            max_steps=6,
            max_tokens=8,
            constrain=True,
        ).collect(panel)
        for n in (2, 6)
    ]
    one, other = (batch.to_numpy() for batch in batches)
    assert batches[0].summary()["num_failures"] == 0.0
    for name in ("completion_token_ids", "prompt_token_ids", "allowed_token_ids", "state_keys"):
        assert one[name].tobytes() == other[name].tobytes()
    assert np.allclose(one["logprobs"], other["logprobs"], atol=1e-5)
    assert one["allowed_offsets"].shape == (len(one["completion_token_ids"]) + 1,)


class Odd(FunctionPolicy):
    """Answers well until something has been collected, then once in a way that no policy may."""

    def __init__(self, odd: Callable[[Completion], Any]) -> None:
        super().__init__(lambda request: "right")
        self._odd, self._polls = odd, 0

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self._polls += 1
        completions = super().poll(timeout_s)
        return [self._odd(c) for c in completions] if self._polls == 2 else completions


@pytest.mark.parametrize(
    "odd",
    [
        lambda completion: None,
        lambda completion: replace(completion, text=None),
        lambda completion: replace(
            completion,
            token_ids=np.zeros(1, np.int32),
            logprobs=np.array([np.nan], np.float32),
        ),
    ],
)
def test_an_answer_that_is_none_fails_its_request_and_loses_nothing(odd: Any) -> None:
    with Rollout("longstep/KeyDoor-v0", Odd(odd), group_size=2, max_steps=3) as rollout:
        batch = rollout.collect([Task(env_id="longstep/KeyDoor-v0", seed=1)])
    reasons = [t.stop_reason for t in batch.trajectories]
    assert reasons.count(StopReason.POLICY_FAILURE) == 2
    assert reasons.count(StopReason.TIME_LIMIT) == 2
    assert sum(len(t.steps) for t in batch.trajectories) == 2 + 6


def test_a_task_of_another_environment_late_in_the_list_costs_nobody_else_anything() -> None:
    tasks = [Task(env_id="longstep/KeyDoor-v0", seed=1), Task(env_id="other", seed=1)]
    policy = FunctionPolicy(lambda request: "look")
    with Rollout("longstep/KeyDoor-v0", policy, group_size=1, max_steps=2, num_envs=1) as rollout:
        batch = rollout.collect(tasks)
    assert [len(t.steps) for t in batch.usable] == [2]
    assert "expected tasks of `longstep/KeyDoor-v0`" in batch.errors[0]


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unspeakable(Corridor):
    def step(self, action: Any) -> Any:
        raise UnspeakableError


def test_an_exception_without_a_message_is_its_members_failure() -> None:
    policy = FunctionPolicy(lambda request: "right")
    with Rollout(lambda: LLMAgentEnv(Unspeakable()), policy, group_size=1) as rollout:
        batch = rollout.collect([Task(env_id="", seed=1)])
    assert "UnspeakableError" in batch.errors[0]
