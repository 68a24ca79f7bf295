"""The same bytes as in process; one environment's trouble is its own; what is wrong is said at once."""

import time

import numpy as np
import pytest
from helpers import commands, gather, reset, step
from worker_envs import Counter, broken, counter, not_an_environment, task

import longstep
from longstep import FunctionPolicy, GroupVectorEnv, Rollout, Task
from longstep.commands import EnvCommand, VectorEnv, next_command_id
from longstep.errors import (
    ConfigError,
    DeadlineError,
    EnvError,
    LongstepError,
    RegistryError,
)
from longstep.state_key import state_key
from longstep_bindings.envs import EnvSpec, RemoteVectorEnv

KEYDOOR = "longstep/KeyDoor-v0"


@pytest.fixture(scope="module")
def envs():
    with RemoteVectorEnv(counter, 6, num_workers=2) as envs:
        yield envs


def assert_equal_batches(batch, other):
    ours, theirs = batch.to_numpy(), other.to_numpy()
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for trajectory, twin in zip(batch.trajectories, other.trajectories, strict=True):
        assert trajectory.trajectory_id == twin.trajectory_id
        assert trajectory.stop_reason == twin.stop_reason
        assert trajectory.success == twin.success
        for one, two in zip(trajectory.steps, twin.steps, strict=True):
            assert (one.prompt, one.action, one.state_key) == (
                two.prompt,
                two.action,
                two.state_key,
            )
            assert state_key(one.observation) == state_key(two.observation)


def choose(request):
    return request.allowed[request.seed % len(request.allowed)]


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        (KEYDOOR, {"size": 3, "style": "plain"}),
        ("longstep/Sokoban-v0", {"dim_room": [6, 6], "num_boxes": 1}),
    ],
)
def test_a_rollout_gives_the_batch_of_the_group_vector_env_byte_for_byte(env_id, kwargs):
    tasks = [Task(env_id=env_id, seed=seed) for seed in range(5)]
    settings = {"group_size": 3, "max_steps": 12, "constrain": True, "seed": 4}
    with RemoteVectorEnv(env_id, 7, num_workers=2, env_kwargs=kwargs) as envs:
        assert isinstance(envs, VectorEnv)
        remote = Rollout(envs, FunctionPolicy(choose), **settings).collect(tasks)
    group = GroupVectorEnv(env_id, 7, env_kwargs=kwargs)
    local = Rollout(group, FunctionPolicy(choose), **settings).collect(tasks)
    assert len(local.rows) > 100
    assert_equal_batches(remote, local)


@pytest.mark.parametrize("blocking", [False, True])
def test_results_are_those_of_the_group_vector_env_infos_and_types_included(blocking):
    make = {"entry_point": "worker_envs:Camera", "blocking": blocking}
    group = GroupVectorEnv(EnvMaker(), 2)
    with RemoteVectorEnv(EnvSpec(**make), 2, num_workers=1) as envs:
        for act in (lambda e: reset(e, {0: 5, 1: 6}), lambda e: step(e, {0: "1", 1: "no such"})):
            ours, theirs = act(envs), act(group)
            for slot in (0, 1):
                assert_same(ours[slot].info, theirs[slot].info)
                for name in ("observation", "reward", "terminated", "truncated", "error"):
                    assert getattr(ours[slot], name) == getattr(theirs[slot], name)
                assert list(ours[slot].info) == list(theirs[slot].info)
        assert ours[0].reward == 1.0
        assert ours[0].info["tags"] == ("a", {"b"})
        assert ours[1].info["action_valid"] is False
    group.close()


class EnvMaker:
    def __call__(self):
        from worker_envs import Camera

        return longstep.LLMAgentEnv(Camera())


def assert_same(one, two):
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for name in one:
            assert_same(one[name], two[name])
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    else:
        assert one == two


def test_raw_environments_give_their_own_observations():
    spec = EnvSpec(entry_point="worker_envs:Camera", wrap=False)
    with RemoteVectorEnv(spec, 1) as envs:
        assert envs.kind == "raw"
        assert reset(envs, {0: 1})[0].observation.shape == (48, 64, 3)
        envs.send([EnvCommand(slot=0, command_id=1, action=1)])
        assert gather(envs, 1)[0].reward == 1.0


def test_an_exception_is_its_own_slots_error_and_the_next_reset_makes_the_environment_anew(envs):
    reset(envs, dict.fromkeys(range(6), 3))
    results = step(envs, {0: "a", 1: "raise the roof", 2: "a", 5: "a"})
    assert results[1].error == "RuntimeError: the roof"
    assert (results[1].observation, results[1].info) == ("", {})
    assert [results[slot].error for slot in (0, 2, 5)] == [None] * 3
    with pytest.raises(ConfigError, match="slot 1 to be in an episode"):
        envs.send(commands({1: "a"}))
    assert reset(envs, {1: 3})[1].info["observation"].endswith("count 0")
    assert step(envs, {0: "a"})[0].info["observation"].endswith("count 2")
    assert reset(envs, {4: 1, 5: 3}, **{"raise": True})[4].error == "ValueError: reset refused"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("object", r"got object \(at info\.deep\.list\[1\]\)"),
        ("nan", r"got NaN at info\.deep\.list\[1\]"),
        ("surrogate", r"info\.deep\.list\[1\]"),
        ("key", r"a key that is a scalar, got tuple in info\.deep\.list\[1\]"),
    ],
)
def test_an_info_that_cannot_cross_is_its_slots_error_with_its_path(envs, what, message):
    reset(envs, {0: 1, 1: 2})
    results = step(envs, {0: f"info {what}", 1: "a"})
    assert results[0].error is not None
    assert results[0].error.startswith("UnsupportedTypeError: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(results[0].error)
    assert results[1].error is None


def test_a_completion_that_cannot_cross_is_its_slots_error(envs):
    reset(envs, {0: 1, 1: 2})
    results = step(envs, {0: "\ud800", 1: "a"})
    assert "UTF-8" in results[0].error
    assert results[1].info["observation"].endswith("count 1")
    assert reset(envs, {0: 1})[0].error is None


def test_wrong_commands_are_refused_and_none_of_them_is_taken(envs):
    reset(envs, {0: 1, 1: 1})
    wrong = {
        "a slot below 6, got 6": EnvCommand(slot=6, command_id=1, action="a"),
        "exactly one of": EnvCommand(slot=1, command_id=1),
        "got both": EnvCommand(slot=1, command_id=1, action="a", task=task(1)),
        "one command at a time for slot 0": EnvCommand(slot=0, command_id=1, action="a"),
    }
    for message, command in wrong.items():
        with pytest.raises(ConfigError, match=message):
            envs.send([*commands({0: "a"}), command])
    assert envs.recv(1, 0.1) == []
    assert step(envs, {0: "a"})[0].info["observation"].endswith("count 1")


def test_recv_waits_for_min_ready_or_its_timeout(envs):
    reset(envs, dict.fromkeys(range(6), 1))
    began = time.monotonic()
    assert envs.recv(3) == []
    assert envs.recv(3, 5.0) == []
    assert time.monotonic() - began < 1.0
    envs.send(commands({0: "sleep 1.0", 3: "a", 4: "a"}))
    assert {result.slot for result in envs.recv(2, 30.0)} == {3, 4}
    assert envs.recv(1, 0.0) == []
    assert envs.recv(1, 0.05) == []
    assert [result.slot for result in envs.recv(9)] == [0]


def test_a_slow_environment_delays_no_other_worker(envs):
    reset(envs, dict.fromkeys(range(6), 1))
    envs.send(commands({0: "sleep 3"}))
    began = time.monotonic()
    for _ in range(20):
        envs.send(commands({3: "a", 4: "a", 5: "a"}))
        results = []
        while len(results) < 3:
            results += envs.recv(3 - len(results), 1.0)
        assert 0 not in {result.slot for result in results}
    assert time.monotonic() - began < 3.0
    assert gather(envs, 1)[0].error is None


def test_a_blocking_environment_delays_nobody_in_its_worker():
    spec = EnvSpec(entry_point="worker_envs:counter", blocking=True)
    with RemoteVectorEnv(spec, 4, num_workers=1) as envs:
        reset(envs, dict.fromkeys(range(4), 1))
        envs.send(commands({0: "sleep 5", 1: "a", 2: "a"}))
        for _ in range(5):
            results = {result.slot for result in envs.recv(2, 3.0)}
            assert results
            assert 0 not in results
            envs.send(commands(dict.fromkeys(results, "a")))
        assert step_wait(envs, 0).info["observation"].endswith("count 1")


def step_wait(envs, slot):
    while True:
        for result in envs.recv(1, 10.0):
            if result.slot == slot:
                return result


def test_tasks_of_another_environment_are_refused():
    with RemoteVectorEnv(KEYDOOR, 1) as envs:
        assert (envs.env_id, envs.num_envs, envs.kind) == (KEYDOOR, 1, "agent")
        with pytest.raises(ConfigError, match=f"expected tasks of `{KEYDOOR}`, got one of `other`"):
            envs.send([EnvCommand(slot=0, command_id=1, task=Task(env_id="other", seed=1))])
        envs.close()
        with pytest.raises(ConfigError, match="were closed"):
            envs.send([EnvCommand(slot=0, command_id=1, task=Task(env_id=KEYDOOR, seed=1))])
        assert envs.recv(1, 1.0) == []
        envs.close()


def test_an_id_registered_by_an_import_is_known_to_the_worker():
    spec = EnvSpec(env_id="test/Counter-v0", imports=("worker_envs",), kwargs={"length": 1})
    with RemoteVectorEnv(spec, 1) as envs:
        reset(envs, {0: 1})
        assert step(envs, {0: "a"})[0].terminated


@pytest.mark.parametrize(
    ("env", "kwargs", "kind", "message"),
    [
        ("longstep/KeyDor-v0", {}, RegistryError, "did you mean `longstep/KeyDoor-v0`"),
        (KEYDOOR, {"sizes": 3}, ConfigError, "did you mean `size`"),
        (broken, {}, LongstepError, "OSError: no such game"),
        (not_an_environment, {}, ConfigError, "to give a gymnasium.Env, got int"),
        (EnvSpec(entry_point="worker_envs:nothing"), {}, ConfigError, "has no attribute 'nothing'"),
        (EnvSpec(entry_point="no_such_module:x"), {}, ConfigError, "No module named"),
        (EnvSpec(env_id="x", imports=("no_such",)), {}, LongstepError, "No module named 'no_such'"),
        (lambda: Counter(), {}, ConfigError, "put the function into a module"),
        (KEYDOOR, {"size": object()}, ConfigError, r"got object \(at \$\.size\)"),
        (3, {}, ConfigError, "an environment id, an EnvSpec, or a function"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_at_once(env, kwargs, kind, message):
    with pytest.raises(kind, match=message):
        RemoteVectorEnv(env, 2, num_workers=1, env_kwargs=kwargs)


def test_wrong_numbers_are_refused():
    for arguments, message in [
        ({"num_envs": 0}, "`num_envs` of at least 1"),
        ({"num_envs": 1, "num_workers": 0}, "at least 1 worker"),
        ({"num_envs": 1, "step_timeout_s": 0}, "seconds above 0 as `step_timeout_s`"),
    ]:
        with pytest.raises(ConfigError, match=message):
            RemoteVectorEnv(counter, **arguments)
    for arguments, message in [
        ({}, "exactly one of `env_id` and `entry_point`, got neither"),
        ({"env_id": "a", "entry_point": "b:c"}, "got both"),
        ({"entry_point": "b.c"}, "as `module:attribute`"),
        ({"env_id": "a", "imports": "b"}, "`imports` as a tuple of str"),
    ]:
        with pytest.raises(ConfigError, match=message):
            EnvSpec(**arguments)
    with pytest.raises(ConfigError, match="did you mean `kwargs`"):
        EnvSpec.from_plain({"env_id": "a", "kwarg": {}})
    spec = EnvSpec(env_id="a", kwargs={"b": (1, b"c")}, imports=["d"], environ={"E": "F"})
    assert EnvSpec.from_plain(spec.to_plain()) == spec


def test_a_first_environment_that_never_comes_is_a_deadline():
    spec = EnvSpec(entry_point="worker_envs:never")
    with pytest.raises(DeadlineError, match="expected the first environment within 6 s"):
        RemoteVectorEnv(spec, 1, reset_timeout_s=1.0)


def test_a_worker_that_cannot_be_started_says_why():
    spec = EnvSpec(entry_point="worker_envs:counter", environ={"PYTHONHOME": "/nonexistent"})
    with pytest.raises(EnvError, match="ended with exit code 1 before it was ready"):
        RemoteVectorEnv(spec, 1)
    with pytest.raises(DeadlineError, match="`start_timeout_s`"):
        RemoteVectorEnv(counter, 1, start_timeout_s=0.01)


def test_environment_variables_reach_the_worker():
    spec = EnvSpec(
        entry_point="os:getenv", wrap=False, environ={"ASKED": "yes"}, kwargs={"key": "ASKED"}
    )
    with pytest.raises(ConfigError, match=r"to give a gymnasium\.Env, got str"):
        RemoteVectorEnv(spec, 1)


def test_the_same_command_ids_come_back(envs):
    ids = {slot: next_command_id() for slot in range(6)}
    envs.send([EnvCommand(slot=slot, command_id=ids[slot], task=task(slot)) for slot in ids])
    assert {result.slot: result.command_id for result in gather(envs, 6).values()} == ids
