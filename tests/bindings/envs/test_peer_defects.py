"""What goes wrong in other environment SDKs, each as a test that passes here.

The numbers are those of the list of defects that were reproduced in peers; `benchmarks/bench_peer_defects.py` shows the
peers at the same.
"""

import threading
import time
from contextlib import ExitStack

import gymnasium
import pytest
from helpers import commands, gather, reset, step
from worker_envs import Counter, counter

from longstep import GroupVectorEnv, LLMAgentEnv, Task
from longstep.errors import ConfigError
from longstep.spaces import TextSpace
from longstep.state_key import state_key
from longstep_bindings.envs import EnvServer, EnvSpec, RemoteVectorEnv
from longstep_bindings.testing import is_gone, play, wait_until

COUNTER = EnvSpec(entry_point="worker_envs:counter")


def count(result):
    assert result.error is None
    return int(result.info["observation"].split("count ")[1])


def test_d1_after_a_timeout_the_next_step_is_taken_in_the_same_environment():
    with RemoteVectorEnv(counter, 1, num_workers=1) as envs:
        reset(envs, {0: 1})
        assert [count(step(envs, {0: "a"})[0]) for _ in range(3)] == [1, 2, 3]
        envs.send(commands({0: "sleep 0.5"}))
        assert envs.recv(timeout_s=0.05) == []  # the caller's patience is at an end
        assert count(gather(envs, 1)[0]) == 4
        assert count(step(envs, {0: "a"})[0]) == 5


def test_d1_after_a_hang_the_next_step_is_refused_and_no_fresh_environment_is_stepped():
    with RemoteVectorEnv(counter, 1, num_workers=1, step_timeout_s=0.5, max_retries=0) as envs:
        reset(envs, {0: 1})
        assert "longer" in step(envs, {0: "hang"})[0].error
        with pytest.raises(ConfigError, match=r"`task` first"):
            step(envs, {0: "a"})


@pytest.mark.parametrize("served", [False, True])
def test_d2_a_hanging_step_is_killed_within_a_second_of_its_deadline_and_reported(served):
    """The kill is timed here; the report comes with the new worker, whose start is not."""
    with ExitStack() as stack:
        if served:
            owner = stack.enter_context(EnvServer(COUNTER, step_timeout_s=1.0))
            envs = RemoteVectorEnv.connect(owner.addresses, 1, max_retries=0)
        else:
            envs = RemoteVectorEnv(COUNTER, 1, num_workers=1, step_timeout_s=1.0, max_retries=0)
            owner = envs
        stack.enter_context(envs)
        reset(envs, {0: 1})
        (pid,) = owner.worker_pids
        envs.send(commands({0: "hang"}))
        began = time.monotonic()
        wait_until(lambda: is_gone(pid))
        assert 1.0 <= time.monotonic() - began < 2.0
        error = gather(envs, 1)[0].error
        assert "expected a step within 1 s" in error
        assert "took longer" in error


def test_d3_an_environment_that_takes_its_worker_down_is_restarted_and_the_others_unaffected():
    with RemoteVectorEnv(counter, 4, num_workers=2, max_retries=0) as envs:
        reset(envs, dict.fromkeys(range(4), 1))
        results = step(envs, {0: "die", 1: "a", 2: "a", 3: "a"})
        assert results[0].error is not None
        assert [count(results[slot]) for slot in (1, 2, 3)] == [1, 1, 1]
        reset(envs, {0: 1})
        results = step(envs, dict.fromkeys(range(4), "a"))
        assert [count(results[slot]) for slot in range(4)] == [1, 2, 2, 2]
        assert envs.num_restarts == 1


def test_d4_results_after_a_timeout_are_those_of_their_own_commands():
    with RemoteVectorEnv(counter, 2, num_workers=2) as envs:
        reset(envs, {0: 1, 1: 1})
        first = commands({0: "a", 1: "sleep 0.5"})
        envs.send(first)
        early = envs.recv(2, timeout_s=0.1)
        late = list(gather(envs, 2 - len(early)).values())
        told = {result.command_id: count(result) for result in [*early, *late]}
        assert told == {command.command_id: 1 for command in first}
        second = commands({0: "a", 1: "a"})
        envs.send(second)
        told = {result.command_id: count(result) for result in gather(envs, 2).values()}
        assert told == {command.command_id: 2 for command in second}


def test_d5_the_text_space_holds_any_text():
    env = LLMAgentEnv(Counter())
    for text in ("hello world", "", 'Größe: 3 µm\n\t{"a": [1]}', "\N{DOOR}" * 10_000):
        assert text in TextSpace()
        assert text in env.action_space
        assert text in env.observation_space


def test_d6_the_last_observation_and_info_of_an_episode_are_there():
    make = lambda: counter(length=2)  # noqa: E731
    group = GroupVectorEnv(make, 2)
    group.reset([1, 2])
    group.step(["a", "a"])
    observations, _, terminated, _, infos = group.step(["a", "a"])
    assert terminated.all()
    assert all("count 2" in text for text in observations)
    assert group.final_observation == observations
    assert group.final_info == infos
    with RemoteVectorEnv(counter, 2, num_workers=1, env_kwargs={"length": 2}) as envs:
        reset(envs, {0: 1, 1: 2})
        step(envs, {0: "a", 1: "a"})
        for slot, result in step(envs, {0: "a", 1: "a"}).items():
            assert result.terminated
            assert result.observation == observations[slot]
            assert result.info["observation"] == infos[slot]["observation"]


def test_d7_the_same_seed_gives_the_same_states_in_threads_processes_and_over_zeromq():
    name = "longstep/Sokoban-v0"
    tasks = [Task(env_id=name, seed=5) for _ in range(4)]
    expected = play(GroupVectorEnv(name, 4), tasks, 15)
    in_threads = [None] * 4

    def run(number):
        in_threads[number] = play(GroupVectorEnv(name, 4), tasks, 15)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_threads == [expected] * 4
    for blocking in (False, True):
        with RemoteVectorEnv(EnvSpec(env_id=name, blocking=blocking), 4, num_workers=2) as envs:
            assert play(envs, tasks, 15) == expected
    with (
        EnvServer(name, "tcp://127.0.0.1:*") as server,
        RemoteVectorEnv.connect(server.addresses, 4) as envs,
    ):
        assert play(envs, tasks, 15) == expected


def test_d7_equal_observations_have_equal_keys_in_other_processes():
    with RemoteVectorEnv(counter, 1, num_workers=1) as envs:
        info = reset(envs, {0: 3})[0].info
        assert info["state_key"] == state_key(info["observation"])


def test_d8_attributes_of_the_wrapped_environment_are_read_through():
    raw = Counter()
    env = LLMAgentEnv(gymnasium.wrappers.TimeLimit(raw, 9))
    env.reset(seed=1)
    for number in (1, 2):
        env.step("a")
        raw.unwrapped.count = number * 10
        assert env.unwrapped.count == number * 10
        assert env.get_wrapper_attr("count") == number * 10
    plain = LLMAgentEnv(Counter())
    plain.reset(seed=1)
    plain.env.count = 42
    assert plain.count == 42


@pytest.mark.parametrize("blocking", [False, True])
def test_d9_one_environments_exception_is_its_own_and_the_others_steps_are_delivered(blocking):
    spec = EnvSpec(entry_point="worker_envs:counter", blocking=blocking)
    with RemoteVectorEnv(spec, 3, num_workers=1) as envs:
        reset(envs, {0: 1, 1: 1, 2: 1})
        results = step(envs, {0: "a", 1: "raise no luck", 2: "a"})
        assert results[1].error == "RuntimeError: no luck"
        assert [count(results[slot]) for slot in (0, 2)] == [1, 1]
        results = step(envs, {0: "a", 2: "a"})
        assert [count(results[slot]) for slot in (0, 2)] == [2, 2]
