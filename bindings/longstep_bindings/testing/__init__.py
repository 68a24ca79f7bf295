"""A fault kit: what goes wrong between a trainer and its environments, on purpose, to try one's own environments with.

- `FaultyLine` stands between a client and a server and drops, duplicates, reorders, corrupts and slows messages.
- `kill`, `hang`, `resume` do to a process what their names say; `state_of`, `wait_until` look at it.
- `FaultRig` serves an environment from workers of its own, each behind such a line; `FaultRig.storm` kills and hangs them.
- `play` gives the transcripts of an environment, to be compared with those of a run without faults.

With pytest, in `conftest.py`: `from longstep_bindings.testing.fixtures import *`. Then

    def test_my_environment_survives(fault_rig):
        tasks = [Task(env_id="my/Env-v0", seed=seed) for seed in range(8)]
        expected = play(GroupVectorEnv("my/Env-v0", 8), tasks, num_steps=100)
        rig = fault_rig("my/Env-v0", 8, faults=Faults(drop=0.05, duplicate=0.05))
        with rig.storm(kill_every=200, hang_every=200):
            assert play(rig.envs, tasks, num_steps=100, timeout_s=60.0) == expected

An environment passes when its states depend on seed and actions alone, for a killed one is built again from these.
"""

from longstep_bindings.testing.line import FaultyLine
from longstep_bindings.testing.line_faults import Faults
from longstep_bindings.testing.processes import hang, is_gone, kill, resume, state_of, wait_until
from longstep_bindings.testing.rig import FaultRig
from longstep_bindings.testing.transcripts import play

__all__ = [
    "FaultRig",
    "Faults",
    "FaultyLine",
    "hang",
    "is_gone",
    "kill",
    "play",
    "resume",
    "state_of",
    "wait_until",
]
