"""The npm package: built and tested by npm in a copy, against Python on the other side in both directions."""

import json
import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import pytest

from longstep.commands import EnvCommand, next_command_id
from longstep.env import LLMAgentEnv
from longstep.errors import DeadlineError
from longstep.types import Task
from longstep.vector import GroupVectorEnv
from longstep_bindings.curve import ClientKeys, ServerKeys, new_keys
from longstep_bindings.envs import EnvServer, RemoteVectorEnv

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "bindings" / "node"
ACTIONS = ["right", "fly", "Right", "left", "right", "right", "right"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package, installed from its lock file and compiled."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("node") / "package"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("node_modules", "dist"))
    for command in (["npm", "ci", "--no-audit", "--no-fund"], ["npm", "run", "build"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@contextmanager
def corridor(package, length, *log, **environ):
    """A node process that serves corridors."""
    program = package / "dist" / "test" / "corridor.js"
    command = ["node", str(program), str(length), str(os.getpid()), *map(str, log)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.terminate()  # so that it removes its socket
        process.communicate(timeout=30.0)


def test_the_lock_file_names_no_host_and_no_folder():
    lock = json.loads((PACKAGE / "package-lock.json").read_text())
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert {"node_modules/zeromq", "node_modules/typescript"} <= set(packages)
    for entry in packages.values():
        assert "resolved" not in entry
        assert entry["integrity"].startswith("sha512-")
    assert re.search(r"https?://|/home/|/root/|file:", json.dumps(packages)) is None


@pytest.fixture
def pairs(tmp_path):
    return {name: new_keys(tmp_path, name) for name in ("server", "friend", "stranger")}


def test_its_own_tests_pass_against_a_python_server(package, pairs, tmp_path):
    vectors = HERE / "vectors" / "protocol_v1.json"
    keys = ServerKeys(own=pairs["server"], allowed=frozenset([pairs["friend"].public]))
    with (
        EnvServer("longstep/KeyDoor-v0") as server,
        EnvServer("longstep/KeyDoor-v0", "tcp://127.0.0.1:*", keys=keys) as guarded,
    ):
        told = {
            "LONGSTEP_VECTORS": str(vectors),
            "LONGSTEP_PYTHON_AGENT": server.addresses[0],
            "LONGSTEP_PYTHON_KEYS": f"{tmp_path}|{guarded.addresses[0]}",
        }
        done = subprocess.run(
            ["npm", "run", "test:built"],
            cwd=package,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"^# (tests|pass|skipped) (\d+)$", done.stdout, re.MULTILINE))
    assert int(counts["pass"]) == int(counts["tests"]) > 50
    assert counts["skipped"] == "0"


class Corridor(gymnasium.Env):
    """The environment of the package's tests, in Python."""

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.place = seed % self.length
        return self.seen(), {"task_description": "go to the end", **self.info()}

    def step(self, action):
        self.place = max(0, self.place + {"left": -1, "right": 1}[action])
        done = self.place >= self.length
        return self.seen(), float(done), done, False, {**self.info(), "success": done}

    def seen(self):
        return f"You stand at {self.place} of {self.length}."

    def info(self):
        return {"admissible_actions": ["left", "right"]}


def play(envs, seed):
    """What an agent is told at each step of an episode."""
    told = []
    for action in [None, *ACTIONS]:
        task = Task(env_id="js/Corridor-v0", seed=seed) if action is None else None
        envs.send([EnvCommand(slot=0, command_id=next_command_id(), task=task, action=action)])
        (result,) = envs.recv(1, 60.0)
        named = ("observation", "reward", "terminated", "truncated", "error")
        keys = ("state_key", "action", "action_valid", "success", "raw_reward", "step")
        told.append([getattr(result, name) for name in named])
        told[-1] += [result.info.get(key) for key in keys]
        if result.terminated:
            break
    return told


def test_python_agents_play_it_as_they_play_in_process(package):
    with corridor(package, 4) as (_, address):
        envs = RemoteVectorEnv.connect(address, 2, connect_timeout_s=60.0)
        remote = [play(envs, seed) for seed in (0, 5)]
        envs.close()
    here = GroupVectorEnv(lambda: LLMAgentEnv(Corridor(4)), num_envs=1)
    assert remote == [play(here, seed) for seed in (0, 5)]
    assert remote[0][-1][2]


def test_python_clients_reach_it_with_an_allowed_key_and_no_other(package, pairs, tmp_path):
    with corridor(package, 4, LONGSTEP_KEYS=str(tmp_path)) as (_, address):
        address = address.replace("0.0.0.0", "127.0.0.1")
        server_public = pairs["server"].public
        friend = ClientKeys(own=pairs["friend"], server_public=server_public)
        stranger = ClientKeys(own=pairs["stranger"], server_public=server_public)
        for _ in range(2):
            envs = RemoteVectorEnv.connect(address, 1, connect_timeout_s=60.0, keys=friend)
            assert play(envs, 0)[0][0]
            envs.close()
            with pytest.raises(DeadlineError, match="does not know this client's key"):
                RemoteVectorEnv.connect(address, 1, connect_timeout_s=1.0, keys=stranger)


def test_it_ends_on_sigterm_and_removes_its_socket(package):
    with corridor(package, 4) as (process, address):
        process.terminate()
        assert process.wait(30.0) == 0
        assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_a_hanging_node_process_ends_with_its_parent(package, tmp_path):
    program = package / "dist" / "test" / "corridor.js"
    parent = (
        "import os, subprocess, time\n"
        f"command = ['node', {str(program)!r}, '9', str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "print(child.pid, child.stdout.readline(), flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(["python3", "-c", parent], stdout=subprocess.PIPE, text=True)
    pid, address = process.stdout.readline().split()
    envs = RemoteVectorEnv.connect(address, 1, wrap=False, connect_timeout_s=60.0, max_restarts=0)
    envs.send([EnvCommand(slot=0, command_id=1, task=Task(env_id="js/Corridor-v0", seed=0))])
    assert envs.recv(1, 60.0)[0].error is None
    envs.send([EnvCommand(slot=0, command_id=2, action="sleep 120")])
    process.kill()
    process.communicate()
    wait_for_end(int(pid), 30.0)
    assert not Path(address.removeprefix("ipc://")).parent.exists()
    envs.close()


def wait_for_end(pid, timeout_s):
    end_at = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end_at, "the node process is still there"
        time.sleep(0.05)
