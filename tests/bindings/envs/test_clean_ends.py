"""However a process ends, nothing of it stays: no worker, none of their children, no socket, no shared memory."""

import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helpers import is_running

from longstep_bindings.testing import wait_until

HOLDER = str(Path(__file__).parent / "holder.py")
ENDS = {
    "close": None,
    "raise": None,
    "forget": None,
    "exit": None,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": signal.SIGKILL,
}


@pytest.fixture
def tmp_path():
    """Short, for the path of a socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ends-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def run(how, number, *options, tmp_path, patience_s=5.0):
    """Start a holder, end it, and check that everything is gone in time."""
    environ = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, HOLDER, how, *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as parent:
        try:
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 4, parent.stderr.read()
            if number is not None:
                assert all(map(is_running, pids))
                assert glob.glob(f"{tmp_path}/longstep-ipc-*")
                parent.send_signal(number)
            parent.wait(60.0)
        finally:
            parent.kill()
        wait_until(lambda: not any(map(is_running, pids)), patience_s)
        wait_until(lambda: not os.listdir(tmp_path), 1.0)
        assert not of_ours(set(os.listdir("/dev/shm")) - shared, {parent.pid, *pids})
        return parent.returncode, parent.stderr.read()


def of_ours(names, pids):
    """Those that do not tell another process's id: others share this folder."""
    told = {name: set(map(int, re.findall(r"\d+", name))) for name in names}
    return [name for name in names if told[name] & pids or not told[name]]


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_of_workers_and_what_they_started(how, tmp_path):
    code, said = run(how, ENDS[how], tmp_path=tmp_path)
    expected = {"close": 0, "raise": 1, "forget": 0, "exit": 3, "interrupt": -signal.SIGINT}
    assert code == expected.get(how, -(ENDS[how] or 0)), said
    if how not in ("raise", "interrupt"):
        assert said == ""


@pytest.mark.parametrize("how", ["close", "raise", "interrupt", "kill"])
def test_nothing_is_left_of_workers_that_hang_or_are_stopped(how, tmp_path):
    run(how, ENDS[how], "hang", tmp_path=tmp_path)


@pytest.mark.parametrize("how", ["close", "forget", "kill"])
def test_nothing_is_left_of_a_server(how, tmp_path):
    run(how, ENDS[how], "serve", tmp_path=tmp_path)


def test_a_killed_reaper_is_no_harm(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, HOLDER, "kill"], stdout=subprocess.PIPE, text=True, env=environ
    ) as parent:
        *workers, reaper, _ = map(int, parent.stdout.readline().split())
        os.kill(reaper, signal.SIGKILL)
        parent.kill()
        parent.wait(60.0)
        wait_until(lambda: not any(map(is_running, workers)), 5.0)


def test_ctrl_c_in_a_terminal_reaches_the_parent_alone(tmp_path):
    """The whole foreground group gets SIGINT; the workers are not in it and are closed by the parent."""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, HOLDER, "with"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.1)
        os.killpg(parent.pid, signal.SIGINT)
        parent.wait(60.0)
        said = parent.stderr.read()
        wait_until(lambda: not any(map(is_running, pids)), 5.0)
        assert said.count("Traceback") == 1
        assert said.rstrip().endswith("KeyboardInterrupt")
