"""Workers that die, are killed, stopped or hang: no step lost, none doubled, or an error that says so."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
from helpers import commands, gather, reset, step
from worker_envs import counter, task

from longstep import FunctionPolicy, GroupVectorEnv, Rollout, StopReason, Task
from longstep.commands import EnvCommand, next_command_id
from longstep.errors import EnvError
from longstep_bindings.envs import EnvSpec, RemoteVectorEnv
from longstep_bindings.envs.board import Board, new_board_file
from longstep_bindings.envs.service import EnvService
from longstep_bindings.rpc import Server
from longstep_bindings.testing import wait_until


def observed(results):
    return {slot: result.info.get("observation") for slot, result in results.items()}


def test_a_killed_worker_is_replaced_and_its_environments_stand_where_they_stood():
    with RemoteVectorEnv(counter, 4, num_workers=2) as envs:
        reset(envs, {0: 1, 1: 2, 2: 3, 3: 4})
        before = step(envs, dict.fromkeys(range(4), "a"))
        pid = envs.worker_pids[0]
        os.kill(pid, signal.SIGKILL)
        after = step(envs, dict.fromkeys(range(4), "b"))
        assert envs.num_restarts == 1
        assert envs.worker_pids[0] not in (pid, None)
        assert [result.error for result in after.values()] == [None] * 4
        twin = GroupVectorEnv(counter, 4)
        reset(twin, {0: 1, 1: 2, 2: 3, 3: 4})
        assert observed(before) == observed(step(twin, dict.fromkeys(range(4), "a")))
        theirs = step(twin, dict.fromkeys(range(4), "b"))
        assert {slot: result.info for slot, result in after.items()} == {
            slot: result.info for slot, result in theirs.items()
        }


def test_a_worker_killed_while_it_rests_is_replaced_before_it_is_needed():
    with RemoteVectorEnv(counter, 1) as envs:
        reset(envs, {0: 1})
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        wait_until(lambda: envs.num_restarts == 1)
        assert observed(step(envs, {0: "a"}))[0].endswith("count 1")


def test_a_command_that_kills_its_worker_once_is_done_again(tmp_path):
    with RemoteVectorEnv(counter, 3, num_workers=1) as envs:
        reset(envs, {0: 1, 1: 1, 2: 1})
        step(envs, {0: "a", 1: "a", 2: "a"})
        results = step(envs, {0: "a", 1: f"die-once {tmp_path}/once", 2: "a"})
        assert {text[-7:] for text in observed(results).values()} == {"count 2"}
        assert envs.num_restarts == 1


def test_a_command_that_kills_its_worker_every_time_is_an_error_of_its_slot_alone():
    with RemoteVectorEnv(counter, 3, num_workers=1) as envs:
        reset(envs, {0: 1, 1: 1, 2: 1})
        results = step(envs, {0: "a", 1: "die", 2: "a"})
        assert results[1].error == "EnvError: the worker ended with exit code 7"
        assert {observed(results)[slot][-7:] for slot in (0, 2)} == {"count 1"}
        assert envs.num_restarts == 2
        assert reset(envs, {1: 1})[1].error is None
        assert observed(step(envs, {1: "a", 2: "a"}))[2].endswith("count 2")


@pytest.mark.parametrize("blocking", [False, True])
def test_a_hanging_step_is_killed_at_its_deadline_and_reported(blocking):
    spec = EnvSpec(entry_point="worker_envs:counter", blocking=blocking)
    with RemoteVectorEnv(spec, 2, num_workers=1, step_timeout_s=3.0, max_retries=0) as envs:
        reset(envs, {0: 1, 1: 1})
        began = time.monotonic()
        results = step(envs, {0: "hang", 1: "a"})
        assert time.monotonic() - began >= 3.0
        assert results[0].error.startswith("EnvError: expected a step within 3 s")
        assert observed(results)[1].endswith("count 1")
        assert envs.num_restarts == 1


def test_the_deadline_holds_for_one_step_and_not_for_those_before_it_in_the_message():
    with RemoteVectorEnv(counter, 4, num_workers=1, step_timeout_s=3.0, max_retries=0) as envs:
        reset(envs, dict.fromkeys(range(4), 1))
        results = step(envs, dict.fromkeys(range(4), "sleep 1.2"))
        assert [result.error for result in results.values()] == [None] * 4
        assert envs.num_restarts == 0


def test_a_step_that_hangs_once_and_a_stopped_process_are_done_again(tmp_path):
    with RemoteVectorEnv(counter, 2, num_workers=1, step_timeout_s=2.0, max_retries=3) as envs:
        reset(envs, {0: 1, 1: 1})
        results = step(envs, {0: f"hang-once {tmp_path}/once", 1: "a"})
        assert {text[-7:] for text in observed(results).values()} == {"count 1"}
        os.kill(envs.worker_pids[0], signal.SIGSTOP)
        results = step(envs, {0: "a", 1: "a"})
        assert {text[-7:] for text in observed(results).values()} == {"count 2"}
        assert envs.num_restarts >= 1


def test_an_environment_that_differs_when_built_again_is_a_failure_and_is_not_stepped_on():
    spec = EnvSpec(entry_point="worker_envs:counter", kwargs={"noise": True})
    with RemoteVectorEnv(spec, 2, num_workers=1) as envs:
        reset(envs, {0: 1, 1: 1})
        step(envs, {0: "a"})
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        wait_until(lambda: envs.num_restarts == 1)
        result = step(envs, {0: "a"})[0]
        assert "the state after 0 steps differs from the one before the restart" in result.error
        assert reset(envs, {0: 1})[0].error is None  # a fresh episode needs no past
        assert step(envs, {0: "a"})[0].error is None


def test_a_rollout_marks_what_could_not_be_built_again_as_a_failure():
    spec = EnvSpec(entry_point="worker_envs:counter", kwargs={"noise": True, "length": 4})

    def policy(request):
        if policy.calls == 3:
            os.kill(envs.worker_pids[0], signal.SIGKILL)
        policy.calls += 1
        return "a"

    policy.calls = 0
    with RemoteVectorEnv(spec, 1) as envs:
        rollout = Rollout(envs, FunctionPolicy(policy), group_size=1, max_rerolls=1)
        batch = rollout.collect([task(1)])
    reasons = [trajectory.stop_reason for trajectory in batch.trajectories]
    assert reasons == [StopReason.ENV_FAILURE, StopReason.TERMINATED]
    assert "differs from the one before the restart" in batch.trajectories[0].error


def test_more_restarts_than_allowed_are_an_error_that_says_so_and_not_a_hang():
    with RemoteVectorEnv(counter, 2, num_workers=2, max_restarts=1, max_retries=100) as envs:
        reset(envs, {0: 1, 1: 1})
        envs.send(commands({0: "die", 1: "a"}))
        assert [result.slot for result in envs.recv(1, 60.0)] == [1]
        with pytest.raises(EnvError, match=r"at most 1 times, got one more: .* exit code 7"):
            envs.recv(1, 120.0)
        with pytest.raises(EnvError, match="`max_restarts`"):
            envs.recv(1, 5.0)


def test_each_action_is_applied_once_to_the_episode_that_counts(tmp_path):
    """What an environment writes to a file shows every step that was ever executed."""
    spec = EnvSpec(entry_point="worker_envs:counter", kwargs={"folder": str(tmp_path)})
    with RemoteVectorEnv(spec, 1) as envs:
        start = observed(reset(envs, {0: 1}))[0].split()[1]
        for _ in range(3):
            step(envs, {0: "a"})
        assert (tmp_path / start).read_text().split() == ["1", "2", "3"]
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        assert observed(step(envs, {0: "a"}))[0].endswith("count 4")
        assert (tmp_path / start).read_text().split() == ["1", "2", "3", "1", "2", "3", "4"]


def test_a_long_episode_is_built_again_in_pieces():
    with RemoteVectorEnv(counter, 1) as envs:
        reset(envs, {0: 1})
        for _ in range(150):
            step(envs, {0: "a"})
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        assert observed(step(envs, {0: "a"}))[0].endswith("count 151")


def test_random_kills_and_stops_change_nothing_in_the_transcripts():
    draw = random.Random(0)
    calls = iter(range(10_000))

    def policy(request):
        is_due = next(calls) >= 40 * (len(faults) + 1)
        if is_due and (pid := draw.choice(envs.worker_pids)) is not None:
            number = signal.SIGKILL if draw.random() < 0.8 else signal.SIGSTOP
            with suppress(ProcessLookupError):  # it ended since it was asked for
                os.kill(pid, number)
            faults.append(number)
        return request.allowed[request.seed % len(request.allowed)]

    faults, key = [], "longstep/KeyDoor-v0"
    settings = {"group_size": 4, "max_steps": 20, "constrain": True}
    tasks = [Task(env_id=key, seed=seed) for seed in range(4)]
    limits = {"step_timeout_s": 2.0, "max_restarts": 1000, "max_retries": 1000}
    with RemoteVectorEnv(key, 8, num_workers=2, **limits) as envs:
        remote = Rollout(envs, FunctionPolicy(policy), **settings).collect(tasks)
        assert envs.num_restarts >= 1
    assert len(faults) >= 3
    choose = FunctionPolicy(lambda request: request.allowed[request.seed % len(request.allowed)])
    local = Rollout(GroupVectorEnv(key, 8), choose, **settings).collect(tasks)
    ours, theirs = remote.to_numpy(), local.to_numpy()
    for name in theirs:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def test_results_of_others_flow_while_a_worker_is_replaced():
    with RemoteVectorEnv(counter, 2, num_workers=2) as envs:
        reset(envs, {0: 1, 1: 1})
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        envs.send(commands({0: "a"}))
        num_meanwhile, is_over = 0, False
        while True:
            again = EnvCommand(slot=1, command_id=next_command_id(), task=task(1))
            envs.send([again] if is_over else commands({1: "a"}))
            results = gather_one(envs)
            if 0 in results:
                break
            is_over = results[1].terminated or results[1].truncated  # it makes many steps meanwhile
            num_meanwhile += 1
        assert num_meanwhile >= 5


def gather_one(envs):
    """The next results by slot, slot 1 among them."""
    results = {}
    while 1 not in results:
        results |= gather(envs, 1)
    return results


class Unwatched(EnvService):
    """As a server in another language may be: nobody kills it when a step takes too long."""

    def open(self, call):
        return {**super().open(call), "has_board": False}


def test_at_a_server_that_nobody_kills_a_hanging_step_is_found_and_reported():
    specs = {"counter": EnvSpec(entry_point="worker_envs:counter")}
    board = Board(new_board_file())
    service = Unwatched(specs, board, step_timeout_s=2.0, reset_timeout_s=10.0)
    with (
        Server(service, num_threads=6) as server,
        RemoteVectorEnv.connect(server.address, 3, max_retries=1) as envs,
    ):
        reset(envs, {0: 1, 1: 1, 2: 1})
        results = step(envs, {0: "a", 1: "sleep 30", 2: "a"})
        assert "its step or reset had no answer in time" in results[1].error
        assert {observed(results)[slot][-7:] for slot in (0, 2)} == {"count 1"}
        assert envs.num_restarts == 3
