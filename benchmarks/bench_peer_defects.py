"""Which peers fail what `tests/bindings/envs/test_peer_defects.py` holds us to: each defect tried on the peer itself.

    python benchmarks/bench_peer_defects.py [--openenv-python PATH] [--gem-python PATH]

Gymnasium is here; OpenEnv and GEM are run by interpreters of their own that have `openenv` and `gem-llm` installed, and
skipped by name without. A line says what was done to the peer, what it did, and whether that is a failure; `ours` is
what longstep does at the same, told by our test of that number. A peer that has mended a defect is shown as sound.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gymnasium
from gymnasium.vector import AsyncVectorEnv

PEERS = Path(__file__).parent / "peer_defects"
Finding = tuple[bool, str]
"""Whether the peer failed, and what it did."""


class Counter(gymnasium.Env[int, int]):
    """Shows its number of steps. Action 1 ends the process, 2 sleeps."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return 0, {}

    def step(self, action):
        if action == 1:
            os._exit(7)
        if action == 2:
            time.sleep(1.0)
        self.count += 1
        return self.count, 0.0, False, False, {}


def d3_worker_ends() -> Finding:
    """One worker of a vector environment ends; then all are stepped again."""
    envs = AsyncVectorEnv([Counter, Counter])
    envs.reset()
    told: list[str] = []
    for actions in ([1, 0], [0, 0], [0, 0]):
        try:
            envs.step(actions)
            told.append("answers")
        except Exception as error:
            told.append(type(error).__name__)
    _end(envs)
    return told[-1] != "answers", f"three steps: {', '.join(told)}"


def d4_results_after_a_timeout() -> Finding:
    """A step takes longer than `step_wait` waits; the next step's observation is looked at.

    With `shared_memory=False`: observations then come with the answers. With shared memory they are read from where the
    environment wrote last, so that a late answer shows in rewards and infos only.
    """
    envs = AsyncVectorEnv([Counter], shared_memory=False)
    envs.reset()
    envs.step_async([2])
    with suppress(multiprocessing.TimeoutError):
        envs.step_wait(timeout=0.1)
    time.sleep(2.0)
    envs.step_async([0])
    shown = int(envs.step_wait(timeout=5.0)[0][0])
    _end(envs)
    return shown != 2, f"with shared_memory=False, the second step shows count {shown}"


def d5_text_space() -> Finding:
    """`Text` is asked for a text with a space in it."""
    holds = gymnasium.spaces.Text(100).contains("hello world")
    return not holds, f"Text(100) holds 'hello world': {holds}"


def _end(envs: AsyncVectorEnv) -> None:
    envs.closed = True  # `close` fails for one whose worker has ended
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


GYMNASIUM: dict[str, Callable[[], Finding]] = {
    "D3": d3_worker_ends,
    "D4": d4_results_after_a_timeout,
    "D5": d5_text_space,
}


def elsewhere(python: str, program: str) -> dict[str, Finding]:
    """The findings that a program prints in another interpreter, as one line of JSON."""
    run = subprocess.run(
        [python, str(PEERS / program)], capture_output=True, text=True, timeout=120
    )
    if run.returncode:
        raise RuntimeError(f"{program} failed: {run.stderr[-2000:]}")
    return {name: tuple(found) for name, found in json.loads(run.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--openenv-python", help="interpreter with `openenv` (D1, D2)")
    parser.add_argument("--gem-python", help="interpreter with `gem-llm` (D6 to D9)")
    options = parser.parse_args()
    for name, check in GYMNASIUM.items():
        show(f"Gymnasium {gymnasium.__version__}", name, check())
    peers = {
        "OpenEnv": (options.openenv_python, "openenv_defects.py", "openenv"),
        "GEM": (options.gem_python, "gem_defects.py", "gem-llm"),
    }
    for peer, (python, program, package) in peers.items():
        if python is None:
            print(f"{peer:<18} skipped: {package} is not installed; see --help")
            continue
        for name, found in elsewhere(python, program).items():
            show(peer, name, found)


def show(peer: str, name: str, found: Finding) -> None:
    failed, what = found
    print(f"{peer:<18}{name:<4}{'FAILS ' if failed else 'sound '}{what}", flush=True)


if __name__ == "__main__":
    main()
