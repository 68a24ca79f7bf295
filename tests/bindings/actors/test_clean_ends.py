"""However a process ends, nothing of it stays: no actor, no socket, no log, no file in shared memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plain_engine import PlainEngine

from longstep_bindings.actors import ActorServer
from longstep_bindings.testing import is_gone, wait_until

HERE = Path(__file__).parent
ENDS = {
    "close": None,
    "raise": None,
    "forget": None,
    "exit": None,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": signal.SIGKILL,
}


def weights_of(*pids):
    """Folders for weights that these processes have in shared memory."""
    starts = tuple(f"longstep-weights-{pid}-" for pid in pids)
    return [name for name in os.listdir("/dev/shm") if name.startswith(starts)]


def run(how, tmp_path, *options, num_processes=3, **environ):
    """Start a holder, end it, and check that everything is gone in time."""
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(HERE), **environ}
    with subprocess.Popen(
        [sys.executable, str(HERE / "holder.py"), how, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as parent:
        try:
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == num_processes, parent.stderr.read()
            if ENDS[how] is not None:
                assert not any(map(is_gone, pids))
                assert bool(weights_of(parent.pid)) == ("update" in options)
                parent.send_signal(ENDS[how])
            parent.wait(60.0)
        finally:
            parent.kill()
        wait_until(lambda: all(map(is_gone, pids)), 20.0)
        wait_until(lambda: not os.listdir(tmp_path), 10.0)
        wait_until(lambda: not weights_of(parent.pid, *pids), 20.0)
        return parent.stderr.read()


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_of_actors(how, tmp_path):
    said = run(how, tmp_path)
    if how not in ("raise", "interrupt"):
        assert said == ""


@pytest.mark.parametrize("how", ["close", "raise", "kill"])
def test_nothing_is_left_of_actors_that_are_stopped(how, tmp_path):
    run(how, tmp_path, "stop")


@pytest.mark.parametrize("how", ["close", "forget", "exit", "kill"])
def test_no_weights_stay_in_shared_memory(how, tmp_path):
    run(how, tmp_path, "update")


def test_an_actor_elsewhere_removes_the_weights_of_a_trainer_that_was_killed(
    tmp_path, tmp_path_factory
):
    address = f"ipc://{tmp_path_factory.mktemp('a')}/s"
    with ActorServer(PlainEngine("any"), address, lost_after_s=2.0):
        run("kill", tmp_path, "update", "elsewhere", num_processes=0, ADDRESS=address)
