"""Steps per second to the same environment, near and far; all in one run.

    python benchmarks/bench_transport.py [--openenv-python PATH] [--num-envs 1024] [--seconds 2] [--rounds 3]

The environment does nothing and shows 600 characters, so that what is left is transport. Ways: in process
(`GroupVectorEnv`), workers over ipc and over tcp, Gymnasium's `AsyncVectorEnv` with pipes and with shared memory, and
OpenEnv's websocket server and client, run by an interpreter that has `openenv` installed. All are given 64 environments,
and the ratios are those of these lines. `bare_transport.py` says what ZeroMQ and msgpack allow without a duty of a transport:
more than that times a peer nobody's transport of this kind can be here. A further line of ours has `--num-envs` environments, for batches are what it is
good at. Rates count steps that came back to the caller, who of ours looks at the columns of a batch; one line is by records.

Beside these: what one environment that takes 100 times as long costs the others, and how long a 640x480 RGB observation
takes beside the same environment in process.

Each rate is the best of `--rounds` short rounds, for on a shared machine noise only slows; a round goes through all ways,
so that a slow minute is no way's alone. Where the machine tells it, a
line of ours also says how much CPU time a step took at the client and at all workers together: what a quiet machine would
do is at most 1 / client, and at most the number of cores / (client + workers).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from longstep.commands import EnvCommand, VectorEnv, next_command_id
from longstep.types import Task
from longstep.vector import GroupVectorEnv
from longstep_bindings.envs import EnvServer, EnvSpec, RemoteVectorEnv
from longstep_bindings.envs.transport_bench import (
    TextEnv,
    batched_steps_per_second,
    steps_per_second,
)

OPENENV = Path(__file__).parent / "openenv_transport.py"
BARE = Path(__file__).parent / "bare_transport.py"
NUM_PEER_ENVS = 64
NUM_WORKERS = 2
STEP_S = 0.0005
"""What a step takes in the measurement with one slow environment; that one takes 100 times as long."""
Rate = tuple[float, str]
"""What was measured, and a remark."""


class Way(NamedTuple):
    """Something that is measured once in each round."""

    key: str
    name: str
    measure: Callable[[], Rate]
    unit: str = "steps/s"

    def best(self, found: Sequence[Rate]) -> Rate:
        """The best of what the rounds gave: the highest rate, the lowest cost."""
        pick = max if self.unit == "steps/s" else min
        return pick(found, key=lambda rate: rate[0])


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


def in_process(num_envs: int, seconds: float) -> Rate:
    with closing(GroupVectorEnv(TextEnv, num_envs)) as envs:
        return batched_steps_per_second(envs, seconds), ""


def ours(num_envs: int, seconds: float, *, tcp: bool = False, by_records: bool = False) -> Rate:
    spec = spec_of("TextEnv")
    if not tcp:
        with RemoteVectorEnv(spec, num_envs, num_workers=NUM_WORKERS) as envs:
            return rate_of(envs, envs.worker_pids, seconds, by_records=by_records)
    with (
        EnvServer(spec, "tcp://127.0.0.1:*", num_workers=NUM_WORKERS) as server,
        RemoteVectorEnv.connect(server.addresses, num_envs, wrap=False) as envs,
    ):
        return rate_of(envs, server.worker_pids, seconds, by_records=by_records)


def rate_of(
    envs: VectorEnv, pids: Sequence[int | None], seconds: float, *, by_records: bool
) -> Rate:
    """Steps per second, and what they cost."""

    def run(seconds: float) -> float:
        if by_records:
            return steps_per_second(envs, "", seconds, lambda _: "go")
        return batched_steps_per_second(envs, seconds)

    run(0.2)  # what is bought once is no part of a step
    began, start = [cpu_seconds(os.getpid()), sum(map(cpu_seconds, pids))], time.perf_counter()
    rate = run(seconds)
    num_steps = rate * (time.perf_counter() - start)
    ended = [cpu_seconds(os.getpid()), sum(map(cpu_seconds, pids))]
    client, workers = (
        1e6 * (last - first) / num_steps for first, last in zip(began, ended, strict=True)
    )
    return rate, f"CPU us a step: client {client:.1f}, workers {workers:.1f}" if workers else ""


def cpu_seconds(pid: int | None) -> float:
    """CPU time of all threads of a process so far; 0 where the machine does not tell."""
    told = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in told) / 1e9


def gymnasium_async(num_envs: int, seconds: float, *, shared_memory: bool = False) -> Rate:
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
        return num_steps / (time.perf_counter() - start), ""


def openenv(python: str, num_envs: int, seconds: float) -> Rate:
    return told_by(python, OPENENV, num_envs, seconds)


def bare(num_envs: int, seconds: float) -> Rate:
    return told_by(sys.executable, BARE, num_envs, NUM_WORKERS, seconds)


def told_by(python: str, script: Path, *arguments: float) -> Rate:
    """The rate that a script prints."""
    command = [python, str(script), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * arguments[-1])
    if run.returncode:
        raise RuntimeError(f"{script.name} failed: {run.stderr[-2000:]}")
    return float(run.stdout.split()[-1]), ""


# ---- other measurements, in the unit of their line ----


def cost_of_a_slow_one(seconds: float) -> Rate:
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
        return 100.0 * (1.0 - rate(envs) / even), ""


def cost_of_a_picture(seconds: float) -> Rate:
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
    return 1000.0 * (float(np.median(times)) - bare_s), ""


def ways(options: argparse.Namespace) -> list[Way]:
    """Everything that is measured."""
    few, many, seconds = NUM_PEER_ENVS, options.num_envs, options.seconds
    peers = f"Gymnasium AsyncVectorEnv, {{}}, {few}"
    return [
        Way("in_process", f"in process, {few}", lambda: in_process(few, seconds)),
        Way("ipc", f"ipc, {few}", lambda: ours(few, seconds)),
        Way("tcp", f"tcp, {few}", lambda: ours(few, seconds, tcp=True)),
        Way("ipc_many", f"ipc, {many}", lambda: ours(many, seconds)),
        Way("tcp_many", f"tcp, {many}", lambda: ours(many, seconds, tcp=True)),
        Way("records", f"ipc, {many}, by records", lambda: ours(many, seconds, by_records=True)),
        Way("bare", f"ZeroMQ and msgpack, bare, {few}", lambda: bare(few, seconds)),
        Way("pipes", peers.format("pipes"), lambda: gymnasium_async(few, seconds)),
        Way(
            "shared",
            peers.format("shared memory"),
            lambda: gymnasium_async(few, seconds, shared_memory=True),
        ),
        Way(
            "openenv",
            f"OpenEnv websocket, {few}",
            lambda: openenv(options.openenv_python, few, seconds),
        ),
        Way(
            "slow_one",
            "one environment 100 times slower costs the others",
            lambda: cost_of_a_slow_one(seconds),
            "%",
        ),
        Way(
            "picture",
            "a 640x480 RGB observation over ipc adds",
            lambda: cost_of_a_picture(seconds),
            "ms",
        ),
    ]


AIMS = {"ipc_many": "at least 200,000", "slow_one": "under 5", "picture": "under 1"}
RATIOS = {
    "pipes": ("AsyncVectorEnv with pipes", "at least 15"),
    "shared": ("AsyncVectorEnv with shared memory", ""),
    "openenv": ("OpenEnv", "at least 50"),
    "in_process": ("in process", ""),
}
"""What `ipc` is compared with, and the aim."""


def show(name: str, value: str, unit: str, *remarks: str) -> None:
    said = "; ".join(remark for remark in remarks if remark)
    print(f"  {name:<52}{value:>12} {unit:<8}{said}".rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--openenv-python", help="interpreter with `openenv`; without it, skipped")
    parser.add_argument("--num-envs", type=int, default=1024, help="of the lines of ours with many")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the numbers too")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{NUM_WORKERS} workers on {cores} cores; best of {options.rounds} rounds of "
        f"{options.seconds:g} s"
    )
    found: dict[str, float] = {}
    wanted = [way for way in ways(options) if way.key != "openenv" or options.openenv_python]
    rounds = [[way.measure() for way in wanted] for _ in range(options.rounds)]
    for way, told in zip(wanted, zip(*rounds, strict=True), strict=True):
        value, remark = way.best(told)
        found[way.key] = value
        aim = f"aim: {AIMS[way.key]}" if way.key in AIMS else ""
        shown = f"{value:,.{0 if way.unit == 'steps/s' else 2}f}"
        show(way.name, shown, way.unit, aim, remark)
    if not options.openenv_python:
        show("OpenEnv", "skipped", "", "openenv is not installed (--openenv-python)")
    for key, (name, aim) in RATIOS.items():
        if key in found:
            ratio = f"{found['ipc'] / found[key]:,.2f}"
            most = f"bare ZeroMQ: {found['bare'] / found[key]:,.2f}"
            show(f"ipc, {NUM_PEER_ENVS} / {name}", ratio, "x", aim and f"aim: {aim}", most)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
