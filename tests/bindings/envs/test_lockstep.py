"""`reset` and `step` of a whole vector environment: the same surface near and far, and the same bytes."""

import os
import random
import signal

import numpy as np
import pytest
from helpers import commands, gather
from worker_envs import counter

from longstep import GroupVectorEnv
from longstep.commands import CommandBatch, EnvCommand, next_command_id
from longstep.errors import ConfigError
from longstep_bindings.envs import EnvSpec, RemoteVectorEnv

KEYDOOR = "longstep/KeyDoor-v0"


def play(envs, num_steps=10):
    """Everything that two episodes show, and what is left of them."""
    seen = []
    for seeds, group_size in (([4, 9], 3), ([1, 2, 3], 2)):
        observations, infos = envs.reset(seeds, group_size=group_size)
        seen.append((observations, infos, envs.group_ids.tobytes()))
        for number in range(num_steps):
            allowed = [info.get("allowed_completions") for info in infos]
            actions = [
                None if over else random.Random(f"{number} {slot}").choice(says)
                for slot, (says, over) in enumerate(zip(allowed, envs.done, strict=True))
            ]
            observations, rewards, terminated, truncated, infos = envs.step(actions)
            flags = (rewards.tobytes(), terminated.tobytes(), truncated.tobytes())
            seen.append((observations, flags, infos, envs.errors))
        seen.append((envs.done.tobytes(), envs.final_observation, envs.final_info))
    return seen


def test_the_surface_gives_the_bytes_of_the_group_vector_env():
    kwargs = {"size": 2, "num_rooms": 1, "style": "plain"}
    local = play(GroupVectorEnv(KEYDOOR, 6, env_kwargs=kwargs))
    with RemoteVectorEnv(KEYDOOR, 6, num_workers=2, env_kwargs=kwargs) as envs:
        assert play(envs) == local
    assert [text is not None for text in local[11][1]].count(True) == 1  # not all end at once


def test_the_surface_gives_the_same_bytes_across_killed_workers():
    local = play(GroupVectorEnv(KEYDOOR, 6))
    with RemoteVectorEnv(KEYDOOR, 6, num_workers=2, max_restarts=100) as envs:
        step, num_calls = envs.step, iter(range(1000))

        def step_after_a_kill(actions):
            if next(num_calls) % 8 == 3:
                os.kill(next(pid for pid in envs.worker_pids if pid), signal.SIGKILL)
            return step(actions)

        envs.step = step_after_a_kill
        assert play(envs) == local
        assert envs.num_restarts >= 3


def test_a_member_that_fails_is_truncated_and_keeps_what_was_last_seen():
    with RemoteVectorEnv(counter, 3, num_workers=2) as envs:
        first, _ = envs.reset([7], group_size=3)
        observations, rewards, terminated, truncated, infos = envs.step(["a", "raise it", "a"])
        assert envs.errors == [None, "RuntimeError: it", None]
        assert truncated.tolist() == [False, True, False]
        assert not terminated.any()
        assert rewards.dtype == np.float64
        assert observations[1] == first[1] == envs.final_observation[1]
        assert infos[1] == {"error": "RuntimeError: it"}
        assert observations[0] != first[0]
        observations = envs.step(["a", None, "a"])[0]
        assert observations[1] == first[1]
        assert envs.reset([7], group_size=3)[0] == first


def test_reset_forgets_what_is_under_way():
    with RemoteVectorEnv(counter, 2, num_workers=1) as envs:
        first, _ = envs.reset([7], group_size=2)
        envs.send(commands({0: "a", 1: "a"}))
        assert envs.reset([7], group_size=2)[0] == first
        assert envs.recv(2) == []


def test_the_surface_says_what_is_wrong_with_a_call():
    with RemoteVectorEnv(counter, 2, num_workers=1) as envs:
        with pytest.raises(ConfigError, match="expected `reset` before this call"):
            envs.step(["a", "a"])
        with pytest.raises(ConfigError, match=r"got 3 \* 1 and 2 environments"):
            envs.reset([1, 2, 3])
        envs.reset([1, 2])
        with pytest.raises(ConfigError, match="expected 2 actions, got 1"):
            envs.step(["a"])
        with pytest.raises(ConfigError, match="an action for slot 1, got None"):
            envs.step(["a", None])
        envs.send(commands({0: "sleep 0.3"}))
        with pytest.raises(ConfigError, match="one command at a time for slot 0"):
            envs.step(["a", "a"])
        gather(envs, 1)
    with pytest.raises(ConfigError, match="expected `reset` before this call"):
        envs.step(["a", "a"])


def test_a_fork_is_seen_by_the_surface():
    with RemoteVectorEnv(counter, 2, num_workers=1) as envs:
        envs.reset([1, 2])
        observations = envs.step(["a", "a"])[0]
        branch = envs.fork(0, into=1)
        observations = envs.step(["b", "b"])[0]
        assert branch.observation != observations[1] == observations[0]


def test_a_batch_goes_out_and_comes_back_by_columns():
    spec = EnvSpec(entry_point="longstep_bindings.envs.transport_bench:TextEnv", wrap=False)
    with RemoteVectorEnv(spec, 300, num_workers=2) as envs:
        envs.reset(range(300))
        for action in ("go", "odd"):
            batch = CommandBatch(range(300), [action] * 300)
            envs.send(batch)
            results = envs.recv(300)
            assert sorted(results.slots) == batch.slots
            by_slot = dict(zip(results.slots, results.command_ids, strict=True))
            assert [by_slot[slot] for slot in batch.slots] == batch.command_ids
            assert {text[:6] for text in results.observations} == {f"page {len(action) % 2}"}
            assert results.rewards == [0.0] * 300
            assert results.infos == [{}] * 300
            assert [type(second) for second in results.seconds] == [float] * 300


def test_slots_may_be_numpys_integers():
    with RemoteVectorEnv(counter, 2, num_workers=2) as envs:
        envs.reset([1, 2])
        envs.send(CommandBatch(np.arange(2), np.array(["a", "b"])))
        assert [result.error for result in envs.recv(2)] == [None, None]
        command = EnvCommand(slot=np.int64(1), command_id=next_command_id(), action="a")
        envs.send([command])
        assert [result.error for result in envs.recv(2)] == [None]
