"""State keys: longstep against verl-agent's hashable form of an observation, measured in the same run.

    python benchmarks/bench_state_key.py [--repeats 5]

Unit: microseconds of CPU time of one thread for each observation, the least over the repeats; the ratio is theirs / ours.
verl-agent makes an array a tuple of its elements, and hashes that at each grouping; a text it hashes as it is, and Python
keeps the hash of a text once it is known, so for text the least is that of a look-up. Grouping by these keys, and similarity, is in `bench_credit.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from slow_credit import hashable

from longstep import kernels
from longstep.state_key import fold_history, state_key, state_keys


def microseconds(function: Callable[[], Any], num_observations: int, repeats: int) -> float:
    """CPU time for each observation."""
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        seconds.append(time.thread_time() - start)
    return min(seconds) / num_observations * 1e6


def verl_agent_hashes(observations: Sequence[Any] | np.ndarray) -> list[int]:
    """What a grouping by dict computes for each observation."""
    return [hash(hashable(observation)) for observation in observations]


def single_keys(observations: Sequence[Any] | np.ndarray) -> list[bytes]:
    return [state_key(observation) for observation in observations]


def cases(rng: np.random.Generator) -> dict[str, tuple[Any, int]]:
    """Observations by name, and how many of them the slow side gets."""
    letters = np.array(list("etaoinshrdlu "))
    texts = ["".join(rng.choice(letters, 600)) for _ in range(2048)]
    boards = rng.integers(0, 7, (65536, 8, 8), np.uint8)
    grids = rng.integers(0, 11, (65536, 7, 7, 3), np.uint8)
    images = rng.integers(0, 256, (2048, 96, 96, 3), np.uint8)
    return {
        "text of 600 characters": (texts, 2048),
        "board of 8x8, uint8": (boards, 2048),
        "grid of 7x7x3, uint8": (grids, 2048),
        "image of 96x96x3, uint8": (images, 64),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    compiled = kernels.warm_up()
    print(
        f"{'observation':<30}{'verl-agent':>11}{'one by one':>11}{'batch':>9}{'numpy':>9}{'ratio':>9}"
    )
    for name, (observations, slow_size) in cases(np.random.default_rng(0)).items():
        few = observations[: min(len(observations), 4096)]
        assert [key.tobytes() for key in state_keys(few)] == single_keys(few)
        part = observations[:slow_size]
        slow = microseconds(lambda part=part: verl_agent_hashes(part), slow_size, repeats)
        one = microseconds(lambda few=few: single_keys(few), len(few), repeats)
        size = len(observations)
        batch = microseconds(lambda all_=observations: state_keys(all_), size, repeats)
        with kernels.numpy_only():
            plain = microseconds(lambda all_=observations: state_keys(all_), size, repeats)
        print(f"{name:<30}{slow:11.2f}{one:11.2f}{batch:9.2f}{plain:9.2f}{slow / batch:8.1f}x")
    keys = state_keys(np.arange(65536) % 999)
    trajectories = np.repeat(np.arange(65536 // 32), 32)
    fold = microseconds(lambda: fold_history(keys, trajectories, 2), len(keys), repeats)
    print(f"{'fold_history, k = 2':<30}{'':>11}{'':>11}{fold:9.2f}")
    print(f"numba: {'yes' if compiled else 'not installed'}")


if __name__ == "__main__":
    main()
