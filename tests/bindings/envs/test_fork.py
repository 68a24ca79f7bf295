"""Branches of trajectories: same action, same observation, whatever way the state was reached."""

import pytest
from helpers import commands, reset, step
from worker_envs import counter, task

from longstep.commands import EnvCommand
from longstep.errors import ConfigError
from longstep.types import Task
from longstep_bindings.envs import EnvSpec, RemoteVectorEnv

KEYDOOR = "longstep/KeyDoor-v0"


def results_equal(one, two):
    return one.info == two.info and (one.observation, one.reward, one.terminated) == (
        two.observation,
        two.reward,
        two.terminated,
    )


def walk(envs, slot, actions):
    """Results of a reset to seed 5 and some actions."""
    envs.send([EnvCommand(slot=slot, command_id=1, task=Task(env_id=KEYDOOR, seed=5))])
    results = [envs.recv()[0]]
    return results + [step(envs, {slot: action})[slot] for action in actions]


@pytest.mark.parametrize("env_id", [KEYDOOR])
@pytest.mark.parametrize("into", [1, 3])
def test_a_branch_stands_where_the_trajectory_stood_and_goes_on_alike(env_id, into):
    actions = ["north", "east", "dance", "east", "north", "south", "west", "take"]
    with RemoteVectorEnv(env_id, 4, num_workers=2) as envs:
        results = walk(envs, 0, actions)
        for at_step in (None, 0, 3, 8):
            branch = envs.fork(0, into=into, at_step=at_step)
            stand = len(actions) if at_step is None else at_step
            assert branch.slot == into
            assert branch.error is None
            assert results_equal(branch, results[stand])
            for number, action in enumerate(actions[stand:], stand + 1):
                assert results_equal(step(envs, {into: action})[into], results[number])
        one, other = step(envs, {0: "east"})[0], step(envs, {into: "east"})[into]
        assert results_equal(one, other)


def test_a_snapshot_is_used_for_the_last_state_in_the_same_worker():
    """A replay would start another process, which this environment tells the id of."""
    with RemoteVectorEnv(counter, 2, num_workers=1) as envs:
        reset(envs, {0: 1, 1: 2})
        last = step(envs, {0: "spawn"})[0]
        branch = envs.fork(0, into=1)
        assert branch.info["child"] == last.info["child"]  # a replay would have started another
        ours, theirs = step(envs, {0: "a"})[0], step(envs, {1: "a"})[1]
        assert results_equal(ours, theirs)
        assert "count 2" in theirs.observation


def test_a_finished_trajectory_can_be_branched_until_its_slot_is_reset():
    spec = EnvSpec(entry_point="worker_envs:counter", kwargs={"length": 3})
    with RemoteVectorEnv(spec, 2, num_workers=1) as envs:
        reset(envs, {0: 1})
        results = [step(envs, {0: action})[0] for action in "abc"]
        assert results[-1].terminated
        assert results_equal(envs.fork(0, into=1, at_step=2), results[1])
        assert results_equal(step(envs, {1: "c"})[1], results[2])
        assert results_equal(envs.fork(0, into=1), results[2])
        with pytest.raises(ConfigError, match="slot 1 to be in an episode"):
            step(envs, {1: "a"})


def test_a_branch_survives_its_worker(tmp_path):
    import os
    import signal

    with RemoteVectorEnv(counter, 2, num_workers=1) as envs:
        reset(envs, {0: 1})
        step(envs, {0: "a"})
        envs.fork(0, into=1)
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        results = step(envs, {0: "b", 1: "b"})
        assert results_equal(results[0], results[1])
        assert "count 2" in results[1].observation


def test_an_environment_that_does_not_repeat_itself_is_no_branch():
    spec = EnvSpec(entry_point="worker_envs:counter", kwargs={"noise": True})
    with RemoteVectorEnv(spec, 2, num_workers=2) as envs:
        reset(envs, {0: 1})
        step(envs, {0: "a"})
        branch = envs.fork(0, into=1)
        assert "the state after 0 steps differs from that of the trajectory" in branch.error


def test_wrong_forks_are_refused():
    with RemoteVectorEnv(counter, 3, num_workers=1) as envs:
        reset(envs, {0: 1})
        for arguments, message in [
            ({"slot": 0, "into": 0}, "two slots below 3"),
            ({"slot": 0, "into": 3}, "two slots below 3"),
            ({"slot": 1, "into": 0}, "slot 1 to have a trajectory"),
            ({"slot": 0, "into": 1, "at_step": 1}, "`at_step` from 0 to 0"),
        ]:
            with pytest.raises(ConfigError, match=message):
                envs.fork(**arguments)
        envs.send(commands({0: "a"}))
        with pytest.raises(ConfigError, match="no command under way in slot 0"):
            envs.fork(0, into=1)
        envs.recv()
        envs.send([EnvCommand(slot=2, command_id=9, task=task(1))])
        assert "count 1" in envs.fork(0, into=1).observation
        assert [result.command_id for result in envs.recv()] == [9]  # kept for whoever awaits it
