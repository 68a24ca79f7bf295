"""Everything goes wrong, again and again, and the transcripts are those of a run in which nothing did."""

import time

import pytest

from longstep import GroupVectorEnv, Task
from longstep_bindings.testing import FaultRig, Faults, hang, play

KEYDOOR = "longstep/KeyDoor-v0"
NUM_ENVS, NUM_WORKERS = 64, 4
BAD = Faults(drop=0.03, duplicate=0.12, reorder=0.1)


def soak(num_faults, *, num_strikes, num_steps, seed, hang_s):
    """Play under faults until there were enough of them, and compare with play in process."""
    group = GroupVectorEnv(KEYDOOR, NUM_ENVS)
    rig = FaultRig(
        KEYDOOR, NUM_ENVS, num_workers=NUM_WORKERS, faults=BAD, seed=seed, step_timeout_s=2.0
    )
    began, num_rounds = time.monotonic(), 0
    with rig, rig.storm(kill_every=100, hang_every=100, hang_s=hang_s, seed=seed):
        while rig.num_faults < num_faults or min_strikes(rig) < num_strikes:
            tasks = [
                Task(env_id=KEYDOOR, seed=100 * num_rounds + slot // 8) for slot in range(NUM_ENVS)
            ]
            # `play` refuses a result that is missing, comes twice or belongs to another command
            seen = play(rig.envs, tasks, num_steps, timeout_s=120.0)
            assert seen == play(group, tasks, num_steps)
            num_rounds += 1
        lines = {name: sum(line.counts[name] for line in rig.lines) for name in rig.lines[0].counts}
    num_commands = num_rounds * num_steps * NUM_ENVS
    print(f"\n{num_commands} commands in {time.monotonic() - began:.1f} s, {lines}, {rig.counts}")
    assert lines["drop"] >= 3
    assert lines["duplicate"] >= 10
    assert lines["reorder"] >= 10
    assert rig.envs.num_restarts >= 1


def min_strikes(rig):
    return min(rig.counts["kill"], rig.counts["hang"])


def test_two_hundred_faults_change_nothing_in_the_transcripts():
    soak(200, num_strikes=3, num_steps=40, seed=1, hang_s=(0.1, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_two_thousand_faults_change_nothing_in_the_transcripts(seed):
    soak(2000, num_strikes=30, num_steps=100, seed=seed, hang_s=(0.1, 0.3, 1.0, None))


def test_a_server_replaces_a_worker_that_is_stopped_while_it_rests():
    tasks = [Task(env_id=KEYDOOR, seed=1)]
    expected = play(GroupVectorEnv(KEYDOOR, 1), tasks, 5)
    with FaultRig(KEYDOOR, 1, num_workers=1) as rig:
        hang(rig.pid(0))
        assert play(rig.envs, tasks, 5, timeout_s=60.0) == expected
        assert rig.server.num_restarts == 1
