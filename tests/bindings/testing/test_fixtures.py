"""The fault kit as its users have it: a folder of their own, pytest run on it, an environment of their own."""

import re
import subprocess
import sys

import pytest

import longstep_bindings.testing

CONFTEST = "from longstep_bindings.testing.fixtures import *\n"
ENVIRONMENT = '''\
import random

import gymnasium

from longstep import TextSpace, register


class Stairs(gymnasium.Env):
    """Climbs; `honest=False` draws from a stream that its seed does not set."""

    action_space = observation_space = TextSpace()

    def __init__(self, honest=True):
        self.draws = random.Random(0) if honest else random.SystemRandom()
        self.honest = honest

    def reset(self, *, seed=None, options=None):
        if self.honest:
            self.draws.seed(seed)
        self.height = 0
        return self.seen(), {"admissible_actions": ["up", "down"]}

    def step(self, action):
        self.height += {"up": 1, "down": -1}[action]
        done = self.height >= 5
        return self.seen(), float(done), done, False, {"admissible_actions": ["up", "down"]}

    def seen(self):
        return f"step {self.height}, cloud {self.draws.randrange(1000)}"


register("my/Env-v0", lambda **kwargs: Stairs(**kwargs))
'''
HEADER = """\
import pytest

import stairs
from longstep import GroupVectorEnv, Task
from longstep_bindings.envs import EnvSpec
from longstep_bindings.testing import Faults, hang, kill, play, resume, wait_until

"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest on a test file of a user, beside their conftest and their environment."""

    def run(tests):
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "stairs.py").write_text(ENVIRONMENT)
        (tmp_path / "test_mine.py").write_text(HEADER + tests)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        counts = {
            name: int(number)
            for number, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)
        }
        return counts, done.stdout + done.stderr

    return run


SPEC = 'SPEC = EnvSpec(env_id="my/Env-v0", imports=("stairs",))\n'


def test_the_example_of_the_documentation_runs(run_pytest):
    """But for the import, by which a worker knows an environment that its users registered."""
    text = longstep_bindings.testing.__doc__
    example = text[text.index("    def test_my") : text.index("\nWhat there is")]
    example = "\n".join(line.removeprefix("    ") for line in example.splitlines())
    assert "fault_rig(SPEC" in example
    counts, said = run_pytest(SPEC + "\n\n" + example + "\n")
    assert counts == {"passed": 1}, said


def test_each_fault_is_at_hand_and_changes_nothing(run_pytest):
    counts, said = run_pytest(
        SPEC
        + """
TASKS = [Task(env_id="my/Env-v0", seed=seed) for seed in range(4)]
LINES = {
    "drop": Faults(drop=0.2),
    "duplicate": Faults(duplicate=0.3),
    "reorder": Faults(reorder=0.3, late_s=0.05),
}


def expected(num_steps):
    return play(GroupVectorEnv("my/Env-v0", 4), TASKS, num_steps)


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line(fault_rig, name):
    rig = fault_rig(SPEC, 4, faults=LINES[name])
    assert play(rig.envs, TASKS, 30, timeout_s=60.0) == expected(30)
    assert rig.num_faults == sum(line.counts[name] for line in rig.lines) > 0


def test_a_line_that_corrupts(fault_rig):
    # what arrives damaged is an error that says so, and nothing else is changed by it
    rig = fault_rig(SPEC, 4, faults=Faults(corrupt=0.2))
    seen = play(rig.envs, TASKS, 30, timeout_s=60.0)
    for lines, right in zip(seen, expected(30), strict=True):
        errors = [line[-1] for line in lines]
        good = next((index for index, error in enumerate(errors) if error), len(lines))
        assert lines[:good] == right[:good]
        assert all(error is None or error.startswith("ProtocolError: ") for error in errors)
    assert rig.num_faults == sum(line.counts["corrupt"] for line in rig.lines) > 0


def test_a_slow_line(fault_rig):
    rig = fault_rig(SPEC, 4, faults=Faults(slow_s=0.02))
    assert play(rig.envs, TASKS, 5, timeout_s=60.0) == expected(5)


def test_killed_and_hanging_workers(fault_rig):
    rig = fault_rig(SPEC, 4)
    rig.kill(0)
    rig.hang(1, 0.2)
    with rig.storm(kill_every=40, hang_every=40, seed=1):
        assert play(rig.envs, TASKS, 60, timeout_s=60.0) == expected(60)
    assert rig.counts["kill"] >= 1 and rig.counts["hang"] >= 1


def test_a_line_that_turns_bad(fault_rig):
    rig = fault_rig(SPEC, 4)
    rig.set_faults(Faults(drop=0.2))
    assert play(rig.envs, TASKS, 30, timeout_s=60.0) == expected(30)
    assert rig.num_faults > 0


def test_a_line_of_ones_own(faulty_line):
    from longstep_bindings.envs import EnvServer, RemoteVectorEnv

    with EnvServer(SPEC, num_workers=1) as server:
        line = faulty_line(server.addresses[0], faults=Faults(duplicate=0.5))
        with RemoteVectorEnv.connect(line.address, 4) as envs:
            assert play(envs, TASKS, 20, timeout_s=60.0) == expected(20)
        assert line.counts["duplicate"] > 0
"""
    )
    assert counts == {"passed": 8}, said


def test_an_environment_that_does_not_repeat_itself_is_found_out(run_pytest):
    counts, said = run_pytest(
        """
SPEC = EnvSpec(env_id="my/Env-v0", imports=("stairs",), kwargs={"honest": False})


def test_mine(fault_rig):
    tasks = [Task(env_id="my/Env-v0", seed=1)]
    rig = fault_rig(SPEC, 1, num_workers=1)
    (lines,) = play(rig.envs, tasks, 3, timeout_s=60.0)
    rig.kill(0)
    (lines,) = play(rig.envs, tasks, 3, timeout_s=60.0)
    assert [line[-1] for line in lines] == [None] * 3
    expected = play(GroupVectorEnv("my/Env-v0", 1, env_kwargs={"honest": False}), tasks, 3)
    assert [lines] == expected
"""
    )
    assert counts == {"failed": 1}, said


def test_nothing_is_left_of_a_test_that_failed(run_pytest, tmp_path):
    counts, said = run_pytest(
        SPEC
        + """
def test_mine(fault_rig):
    rig = fault_rig(SPEC, 2)
    print("pids", *rig.server.worker_pids, "end")
    assert False
"""
    )
    assert counts == {"failed": 1}, said
    (told,) = re.findall(r"pids ([\d ]+) end", said)
    for pid in map(int, told.split()):
        assert longstep_bindings.testing.is_gone(pid)
