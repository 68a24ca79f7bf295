"""The wheel without extras, seen from outside the repository: imports, credit, environments, the command."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np

import longstep
from longstep import credit


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished `longstep` command of this environment."""
    command = [str(Path(sys.executable).with_name("longstep")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


for name in ("torch", "numba", "zmq", "msgpack", "transformers"):
    assert importlib.util.find_spec(name) is None, f"`{name}` is installed: this tests nothing"

# Two trajectories of one group meet in state 7; the second one is rewarded.
advantages = credit.gigpo(
    np.array([0.0, 0.0, 0.0, 1.0], dtype=np.float32),
    np.array([0, 0, 1, 1]),
    np.array([0, 0, 0, 0]),
    np.array([7, 8, 7, 9], dtype=np.uint64),
    gamma=1.0,
)
# Episode returns 0 and 1 around their mean; in state 7 the returns 0 and 1 around theirs.
np.testing.assert_allclose(advantages.total, [-1.0, -0.5, 1.0, 0.5], atol=1e-6)

env = longstep.make("longstep/KeyDoor-v0")
text, info = env.reset(seed=0)
assert text
assert info["prompt"].messages
env.step(info["admissible_actions"][0])
env.close()

trainers = importlib.util.find_spec("longstep_trainers")
assert trainers is not None
assert trainers.origin is not None
assert (Path(trainers.origin).parent / "configs" / "demo.yaml").is_file()
assert run_command("--version").stdout.split()[-1] == longstep.__version__
assert "longstep/KeyDoor-v0" in run_command("envs").stdout
train = run_command("train", "--env.name", "longstep/KeyDoor-v0")
assert train.returncode == 1, train
assert "longstep[trainers]" in train.stderr, train.stderr
assert "Traceback" not in train.stderr, train.stderr
print(f"longstep {longstep.__version__} works without extras")
