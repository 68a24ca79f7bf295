"""A fault kit: what goes wrong between a trainer and its environments, on purpose, to try one's own environments with.

- `FaultyLine` stands between a client and a server and drops, duplicates, reorders, corrupts and slows messages.
- `kill`, `hang`, `resume` do to a process what their names say; `state_of`, `wait_until` look at it.
- `FaultRig` serves an environment from workers of its own, each behind such a line; `FaultRig.storm` kills and hangs them.
- `play` gives the transcripts of an environment, to be compared with those of a run without faults.

With pytest, in `conftest.py`: `from longstep_bindings.testing.fixtures import *`. Then `fault_rig` makes a `FaultRig` and
`faulty_line` a `FaultyLine`, with their arguments, and both are closed when the test ends, however it ends. `SPEC` is how a
worker makes your environment; `imports` are the modules that register it.

    SPEC = EnvSpec(env_id="my/Env-v0", imports=("my_package.envs",))

    def test_my_environment_survives(fault_rig):
        tasks = [Task(env_id="my/Env-v0", seed=seed) for seed in range(8)]
        expected = play(GroupVectorEnv("my/Env-v0", 8), tasks, num_steps=100)
        rig = fault_rig(SPEC, 8, faults=Faults(drop=0.05, duplicate=0.05))
        with rig.storm(kill_every=200, hang_every=200):
            assert play(rig.envs, tasks, num_steps=100, timeout_s=60.0) == expected

What there is: `Faults(drop=, duplicate=, reorder=, corrupt=, slow_s=)` for the lines of a rig, from the start or by
`rig.set_faults`; `rig.kill(worker)`, `rig.hang(worker, seconds)` and `rig.storm(...)` for its workers; `rig.num_faults`,
`rig.counts` and `rig.lines[i].counts` tell what was done.

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
