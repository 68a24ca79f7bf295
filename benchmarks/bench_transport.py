"""Steps per second to the same environment, near and far; all in one run.

    python benchmarks/bench_transport.py [--openenv-python PATH] [--seconds 2] [--num-envs 256]

The environment does nothing and shows 600 characters, so that what is left is transport. Ways: in process
(`GroupVectorEnv` on the raw environment), workers over ipc and over tcp, Gymnasium's `AsyncVectorEnv` with pipes and with
shared memory, and OpenEnv's websocket server and client, run by an interpreter that has `openenv` installed. Gymnasium and
OpenEnv are given 64 environments, as ours are in the lines that the ratios come from; the lines with more environments
are ours alone, for batches are what they are good at. Rates count steps that came back to the caller.

Beside these: what one environment that takes 100 times as long costs the others, and how long a 640x480 RGB observation
takes beside the same environment in process.

Each rate is the best of `--rounds` short rounds, for on a shared machine noise only slows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from longstep.commands import EnvCommand, VectorEnv, next_command_id
from longstep.types import Task
from longstep_bindings.envs import EnvServer, EnvSpec, RemoteVectorEnv
from longstep_bindings.envs.transport_bench import TextEnv, steps_per_second

OPENENV = Path(__file__).parent / "openenv_transport.py"
NUM_PEER_ENVS = 64
NUM_WORKERS = 2
STEP_S = 0.0005
"""What a step takes in the measurement with one slow environment; that one takes 100 times as long."""


class TextEnvOfFixedLength(TextEnv):
    """The same, with a space that Gymnasium can share memory for."""

    def __init__(self) -> None:
        super().__init__()
        letters = "".join(map(chr, range(32, 127)))
        self.observation_space = gymnasium.spaces.Text(600, charset=letters)
        self.action_space = gymnasium.spaces.Text(10)


class SleepyEnv(TextEnv):
    """Takes a while for a step, and 100 times as long if its seed is 1."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.step_s = STEP_S * (100 if seed == 1 else 1)
        return super().reset()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.step_s)
        return super().step(action)


class PictureEnv(gymnasium.Env[np.ndarray, str]):
    """Shows one of two pictures of 640x480 pixels."""

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self._pictures = draws.integers(0, 256, (2, 480, 640, 3), dtype=np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return self._pictures[0], {}

    def step(self, action: str) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._pictures[len(action) % 2], 0.0, False, False, {}


def spec_of(name: str, **options: Any) -> EnvSpec:
    module = "bench_transport" if __name__ == "__main__" else __name__
    return EnvSpec(entry_point=f"{module}:{name}", wrap=False, **options)


def reset_all(envs: VectorEnv, seeds: list[int]) -> None:
    tasks = [Task(env_id="", seed=seed) for seed in seeds]
    envs.send(
        [
            EnvCommand(slot=slot, command_id=next_command_id(), task=task)
            for slot, task in enumerate(tasks)
        ]
    )
    assert all(result.error is None for result in envs.recv(len(seeds)))


def step(slot: int) -> EnvCommand:
    return EnvCommand(slot=slot, command_id=next_command_id(), action="go")


# ---- steps per second ----


def in_process(num_envs: int, seconds: float) -> float:
    """A bare loop over the environments, the least there can be."""
    envs = [TextEnv() for _ in range(num_envs)]
    for env in envs:
        env.reset()
    num_steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for env in envs:
            env.step("go")
        num_steps += num_envs
    return num_steps / (time.perf_counter() - start)


def ours(num_envs: int, seconds: float, *, tcp: bool = False) -> float:
    spec = spec_of("TextEnv")
    if not tcp:
        with RemoteVectorEnv(spec, num_envs, num_workers=NUM_WORKERS) as envs:
            return steps_per_second(envs, "", seconds, lambda _: "go")
    with (
        EnvServer(spec, "tcp://127.0.0.1:*", num_workers=NUM_WORKERS) as server,
        RemoteVectorEnv.connect(server.addresses, num_envs, wrap=False) as envs,
    ):
        return steps_per_second(envs, "", seconds, lambda _: "go")


def gymnasium_async(num_envs: int, seconds: float, *, shared_memory: bool) -> float:
    envs = gymnasium.vector.AsyncVectorEnv(
        [TextEnvOfFixedLength] * num_envs, shared_memory=shared_memory
    )
    with closing(envs):
        envs.reset()
        actions = ("go",) * num_envs
        envs.step(actions)
        num_steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            envs.step(actions)
            num_steps += num_envs
        return num_steps / (time.perf_counter() - start)


def openenv(python: str, num_envs: int, seconds: float) -> float:
    command = [python, str(OPENENV), str(num_envs), str(seconds)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * seconds)
    if run.returncode:
        raise RuntimeError(f"OpenEnv failed: {run.stderr[-2000:]}")
    return float(run.stdout.split()[-1])


# ---- other measurements, in the unit of their line ----


def cost_of_a_slow_one(seconds: float) -> float:
    """By how much the others slow down, in percent, when one of 8 environments is 100 times as slow."""

    def rate(envs: VectorEnv) -> float:
        """Steps of all but the first."""
        envs.send([step(slot) for slot in range(8)])
        num_steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            results = envs.recv()
            num_steps += sum(result.slot > 0 for result in results)
            envs.send([step(result.slot) for result in results])
        elapsed_s = time.perf_counter() - start
        envs.recv(8)
        return num_steps / elapsed_s

    with RemoteVectorEnv(spec_of("SleepyEnv", blocking=True), 8, num_workers=NUM_WORKERS) as envs:
        reset_all(envs, [0] * 8)
        rate(envs)
        even = rate(envs)
        reset_all(envs, [1] + [0] * 7)
        return 100.0 * (1.0 - rate(envs) / even)


def cost_of_a_picture(seconds: float) -> float:
    """Milliseconds that ipc adds to a step that shows a picture."""
    env = PictureEnv()
    start = time.perf_counter()
    for _ in range(1000):
        env.step("go")
    bare_s = (time.perf_counter() - start) / 1000
    with RemoteVectorEnv(spec_of("PictureEnv"), 1, num_workers=1) as envs:
        reset_all(envs, [0])
        times, end_at = [], time.perf_counter() + seconds
        while time.perf_counter() < end_at:
            start = time.perf_counter()
            envs.send([step(0)])
            (result,) = envs.recv()
            times.append(time.perf_counter() - start)
            assert np.asarray(result.observation).shape == (480, 640, 3)
    return 1000.0 * (float(np.median(times)) - bare_s)


def measure(options: argparse.Namespace) -> Iterator[tuple[str, str, float | None, str]]:
    """Key, what it is, what was measured (None when it could not be) and its unit."""

    def best(rate: Callable[[], float], pick: Callable[..., float] = max) -> float:
        return pick(rate() for _ in range(options.rounds))

    few, many, seconds = NUM_PEER_ENVS, options.num_envs, options.seconds
    unit = "steps/s"
    yield "in_process", f"in process, {few}", best(lambda: in_process(few, seconds)), unit
    yield "ipc", f"ipc, {few}", best(lambda: ours(few, seconds)), unit
    yield "tcp", f"tcp, {few}", best(lambda: ours(few, seconds, tcp=True)), unit
    yield "ipc_many", f"ipc, {many}", best(lambda: ours(many, seconds)), unit
    for key, shared in (("pipes", False), ("shared", True)):
        name = f"Gymnasium AsyncVectorEnv, {'shared memory' if shared else 'pipes'}, {few}"
        rate = best(lambda shared=shared: gymnasium_async(few, seconds, shared_memory=shared))
        yield key, name, rate, unit
    rate = None
    if options.openenv_python:
        rate = best(lambda: openenv(options.openenv_python, few, seconds))
    yield "openenv", f"OpenEnv websocket, {few}", rate, unit
    slow = best(lambda: cost_of_a_slow_one(seconds), min)
    yield "slow_one", "one environment 100 times slower costs the others", slow, "%"
    picture = best(lambda: cost_of_a_picture(seconds), min)
    yield "picture", "a 640x480 RGB observation over ipc adds", picture, "ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--openenv-python", help="interpreter with `openenv`; without it, skipped")
    parser.add_argument("--num-envs", type=int, default=1024, help="of the line of ours with many")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the numbers too")
    options = parser.parse_args()
    print(f"{NUM_WORKERS} workers; best of {options.rounds} rounds of {options.seconds:g} s")
    found: dict[str, float] = {}
    for key, name, value, unit in measure(options):
        if value is None:
            print(f"  {name:<52} skipped: openenv is not installed (--openenv-python)")
            continue
        found[key] = value
        print(f"  {name:<52}{value:>12,.{0 if unit == 'steps/s' else 2}f} {unit}", flush=True)
    for key, name in (("pipes", "pipes"), ("shared", "shared memory"), ("openenv", "OpenEnv")):
        if key in found:
            print(f"  ipc / {name:<46}{found['ipc'] / found[key]:>12.1f} x")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
