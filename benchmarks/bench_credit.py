"""Credit assignment: longstep against verl-agent's method (`slow_credit.py`), measured in the same run.

    python benchmarks/bench_credit.py [--only NAME ...] [--repeats 15] [--json out/bench_credit.json]

Every case checks that both give the same advantages, returns or groups, then times them in turn. Times are CPU time
of one thread, the median over the repeats (what is slow is run as often as `SLOW_BUDGET_S` allows, at least once); the
ratio is slow / ours. A slow time that would take minutes is measured on a part and scaled, and marked with `~`.
Memory is the peak that a call allocates, traced in a run of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import slow_credit
import torch

from longstep import kernels
from longstep.credit import (
    PRESETS,
    StepGroups,
    discounted_returns,
    gigpo,
    group_similar,
    group_steps,
)
from longstep.state_key import state_keys

SLOW_BUDGET_S = 3.0
WORDS = [
    "you",
    "are",
    "in",
    "the",
    "middle",
    "of",
    "a",
    "room",
    "looking",
    "quickly",
    "around",
    "see",
    "cabinet",
    "drawer",
    "countertop",
    "fridge",
    "sink",
    "table",
    "shelf",
    "garbagecan",
    "microwave",
    "stoveburner",
    "toaster",
    "coffeemachine",
    "mug",
    "plate",
    "apple",
    "lettuce",
    "knife",
    "fork",
    "spoon",
    "lamp",
    "sofa",
    "armchair",
    "bed",
    "desk",
    "dresser",
    "on",
    "closed",
    "open",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "8",
    "9",
    "nothing",
    "happens",
    "take",
    "put",
    "go",
    "to",
    "with",
    "and",
    "from",
]


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    case: str
    unit: str
    slow_ms: float
    ours_ms: float
    numpy_ms: float | None
    """None where the twin is the slow side's own algorithm and would take as long."""
    slow_mib: float | None
    ours_mib: float
    scaled: bool = False

    @property
    def ratio(self) -> float:
        return self.slow_ms / self.ours_ms

    @property
    def numpy_ratio(self) -> float | None:
        return None if self.numpy_ms is None else self.slow_ms / self.numpy_ms


@dataclass(frozen=True)
class Rollouts:
    """A batch of trajectories, as both sides take it."""

    rewards: np.ndarray
    trajectories: np.ndarray
    groups: np.ndarray
    observations: Any

    @property
    def names(self) -> tuple[np.ndarray, np.ndarray]:
        """Trajectories and groups as the strings of the slow side."""
        return tuple(
            np.array([f"{prefix}-{number:032d}" for number in column], dtype=object)
            for prefix, column in (("t", self.trajectories), ("g", self.groups))
        )


def rollouts(num_groups: int, members: int, lengths: tuple[int, int], num_states: int) -> Rollouts:
    """Episode groups of `members` trajectories over `num_states` texts of about 600 characters each."""
    rng = np.random.default_rng(7)
    num_steps = rng.integers(lengths[0], lengths[1] + 1, num_groups * members)
    trajectories = np.repeat(np.arange(num_groups * members), num_steps)
    groups = trajectories // members
    rewards = np.zeros(len(trajectories), np.float32)
    solved = rng.random(len(num_steps)) < 0.5
    rewards[np.cumsum(num_steps)[solved] - 1] = 10.0
    pools = [[text(rng, 110) for _ in range(num_states)] for _ in range(min(num_groups, 64))]
    states = rng.zipf(1.3, len(trajectories)) % num_states
    observations = [
        pools[group % len(pools)][state] + f" {group}"  # a string object of its own in each row
        for group, state in zip(groups.tolist(), states.tolist(), strict=True)
    ]
    return Rollouts(rewards, trajectories, groups, observations)


def text(rng: np.random.Generator, num_words: int) -> str:
    return " ".join(WORDS[at] for at in rng.integers(0, len(WORDS), num_words))


def timed(function: Callable[[], Any]) -> float:
    """Milliseconds of this thread's CPU time."""
    start = time.thread_time()
    function()
    return 1e3 * (time.thread_time() - start)


def peak_mib(function: Callable[[], Any]) -> float:
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def compare(
    case: str,
    unit: str,
    slow: Callable[[], Any] | float,
    ours: Callable[[], Any],
    repeats: int,
    *,
    scale: float = 1.0,
    added_ms: Callable[[], float] | None = None,
    slow_mib: float | None = None,
    with_numpy: bool = True,
) -> Line:
    """Time both sides in turn; `scale` and `added_ms` complete a slow side that was measured on a part.

    `slow` may also be the milliseconds that its one run in this process took, where one takes minutes.
    """
    ours(), ours()
    slow_ms, ours_ms, numpy_ms = [], [], []
    if not callable(slow):
        slow_ms.append(slow)
    for _ in range(repeats):
        ours_ms.append(timed(ours))
        if with_numpy and sum(numpy_ms) < 1e3 * SLOW_BUDGET_S:
            with kernels.numpy_only():
                numpy_ms.append(timed(ours))
        if callable(slow) and sum(slow_ms) < 1e3 * SLOW_BUDGET_S:
            slow_ms.append(timed(slow))
    return Line(
        case=case,
        unit=unit,
        slow_ms=scale * median(slow_ms) + (added_ms() if added_ms else 0.0),
        ours_ms=median(ours_ms),
        numpy_ms=median(numpy_ms) if numpy_ms else None,
        slow_mib=slow_mib,
        ours_mib=peak_mib(ours),
        scaled=scale != 1.0 or added_ms is not None,
    )


def same_partition(ids: np.ndarray, names: np.ndarray) -> bool:
    """The same rows together, whatever the groups are called."""
    pairs = set(zip(ids.tolist(), names.tolist(), strict=True))
    return len(pairs) == len(set(ids.tolist())) == len(set(names.tolist()))


def bench_whole_pass(repeats: int) -> list[Line]:
    """16 tasks x 8 trajectories of 20 to 50 steps, cut to 4,334 rows, text states."""
    data = rollouts(16, 8, (20, 50), 60)
    size = 4334
    data = Rollouts(
        *(
            column[:size]
            for column in (data.rewards, data.trajectories, data.groups, data.observations)
        )
    )
    trajectories, groups = data.names
    keys = state_keys(data.observations)
    texts = np.array(data.observations, dtype=object)

    def slow() -> np.ndarray:
        return slow_credit.gigpo(data.rewards, trajectories, groups, texts)

    def ours(states: Any) -> np.ndarray:
        preset = PRESETS["verl_agent"]
        return gigpo(data.rewards, data.trajectories, data.groups, states, **preset).total

    np.testing.assert_allclose(ours(keys), slow(), atol=1e-4)
    slow_mib = peak_mib(slow)
    return [
        compare(
            "whole pass, keys ready",
            f"{size:,} rows",
            slow,
            lambda: ours(keys),
            repeats,
            slow_mib=slow_mib,
        ),
        compare(
            "whole pass, from texts",
            f"{size:,} rows",
            slow,
            lambda: ours(data.observations),
            repeats,
            slow_mib=slow_mib,
        ),
    ]


def bench_returns(repeats: int) -> list[Line]:
    """64 tasks x 8 trajectories of 50 steps."""
    data = rollouts(64, 8, (50, 50), 3)
    trajectories, _ = data.names

    def slow(size: int | None = None) -> torch.Tensor:
        return slow_credit.discounted_returns(data.rewards[:size], trajectories[:size], 0.95)

    def ours() -> np.ndarray:
        return discounted_returns(data.rewards, data.trajectories, 0.95)

    np.testing.assert_allclose(ours()[:1000], slow(1000).numpy(), atol=1e-4)
    return [compare("returns", f"{len(data.rewards):,} rows", slow, ours, repeats)]


def bench_large(repeats: int) -> list[Line]:
    """1,024 tasks x 8 trajectories of 32 steps; the slow side's returns are measured on 500 rows and scaled."""
    data = rollouts(1024, 8, (32, 32), 60)
    trajectories, groups = data.names
    texts = np.array(data.observations, dtype=object)
    keys = state_keys(data.observations)
    size, num_trajectories = len(texts), data.trajectories[-1] + 1
    returns = discounted_returns(data.rewards, data.trajectories, 0.95)
    by_name = {
        name: returns[at : at + 32]
        for at, name in zip(range(0, size, 32), trajectories[::32], strict=True)
    }
    sample = list(range(0, size, size // 500))

    def slow_without_returns() -> np.ndarray:
        return slow_credit.gigpo(
            data.rewards, trajectories, groups, texts, returns=torch.tensor(returns)
        )

    def slow_returns_ms() -> float:
        def rows() -> None:
            for row in sample:
                slow_credit.returns_at(by_name, trajectories, row, trajectories[row])

        return timed(rows) / len(sample) * (size + num_trajectories / 2)

    def ours() -> np.ndarray:
        preset = PRESETS["verl_agent"]
        return gigpo(data.rewards, data.trajectories, data.groups, keys, **preset).total

    np.testing.assert_allclose(ours(), slow_without_returns(), atol=1e-4)
    line = compare(
        "whole pass, keys ready",
        f"{size:,} rows",
        slow_without_returns,
        ours,
        repeats,
        added_ms=slow_returns_ms,
    )
    return [line]


def bench_images(repeats: int) -> list[Line]:
    """8,192 images of 96 x 96 x 3 in 32 groups, 30% of them repeated; the slow side on 128 of them, scaled."""
    rng = np.random.default_rng(7)
    size, part = 8192, 128
    images = rng.integers(0, 256, (size, 96, 96, 3), np.uint8)
    groups = np.arange(size) * 32 // size
    for row in np.flatnonzero(rng.random(size) < 0.3):
        first = np.searchsorted(groups, groups[row])
        images[row] = images[rng.integers(first, row + 1)]
    names = np.array([f"g-{group:032d}" for group in groups], dtype=object)

    def slow(part: int = part) -> np.ndarray:
        return slow_credit.equal_groups(images[:part], names[:part])

    def ours() -> StepGroups:
        return group_steps(state_keys(images), groups)

    assert same_partition(ours().ids[:part], slow())
    return [
        compare(
            "grouping of images",
            f"{size:,} of 96x96x3",
            slow,
            ours,
            repeats,
            scale=size / part,
            slow_mib=peak_mib(lambda: slow(16)) * size / 16,
        )
    ]


def bench_similarity(repeats: int) -> Iterator[Line]:
    """Nearly equal texts: ours exact (`indel`), and ours with the slow side's own clusters (`difflib`).

    The slow side takes minutes: it runs once for each size, for both lines and for the check that clusters agree.
    """
    rng = np.random.default_rng(7)
    for size, num_words, per_group, threshold in ((400, 108, 400, 0.95), (3800, 350, 60, 0.9)):
        pool = [text(rng, num_words) for _ in range(size // 8)]
        texts = [changed(rng, pool[at]) for at in rng.integers(0, len(pool), size)]
        groups = np.arange(size) // per_group
        names = np.array([f"g-{group:032d}" for group in groups], dtype=object)
        start = time.thread_time()
        clusters = slow_credit.similar_groups(texts, names, threshold)
        slow_ms = 1e3 * (time.thread_time() - start)
        for method in ("indel", "difflib"):
            ours = partial(group_similar, texts, groups, threshold, method=method)
            assert method == "indel" or same_partition(ours().ids, clusters)
            unit = f"{size:,} texts of {num_words} words"
            name = f"similarity {threshold}, {method}"
            with_numpy = method == "indel" or size < 1000
            yield compare(name, unit, slow_ms, ours, min(repeats, 3), with_numpy=with_numpy)


def changed(rng: np.random.Generator, original: str) -> str:
    """A text with up to three words replaced."""
    words = original.split()
    for _ in range(rng.integers(0, 4)):
        words[rng.integers(len(words))] = WORDS[rng.integers(len(WORDS))]
    return " ".join(words)


def bench_plain_dict(repeats: int) -> list[Line]:
    """The honest line: exact grouping of short texts, against one dictionary in plain Python."""
    data = rollouts(16, 8, (34, 34), 60)
    pairs = data.groups.tolist()

    def plain() -> np.ndarray:
        numbers: dict[tuple[int, str], int] = {}
        rows = zip(pairs, data.observations, strict=True)
        return np.array([numbers.setdefault(pair, len(numbers)) for pair in rows])

    def ours() -> StepGroups:
        return group_steps(data.observations, data.groups)

    np.testing.assert_array_equal(ours().ids, plain())
    return [compare("grouping of texts, plain dict", f"{len(pairs):,} rows", plain, ours, repeats)]


CASES: dict[str, Callable[[int], Iterable[Line]]] = {
    "whole": bench_whole_pass,
    "returns": bench_returns,
    "large": bench_large,
    "images": bench_images,
    "similarity": bench_similarity,
    "dict": bench_plain_dict,
}


HEAD = (
    f"{'case':32} {'unit':24} {'slow ms':>11} {'ours ms':>9} {'ratio':>10} {'numpy ms':>9} {'ratio':>10} "
    f"{'slow MiB':>9} {'ours MiB':>9}"
)


def row_of(line: Line) -> str:
    slow = f"{'~' if line.scaled else ''}{line.slow_ms:,.1f}"
    memory = "-" if line.slow_mib is None else f"{line.slow_mib:,.1f}"
    numpy_ms = "-" if line.numpy_ms is None else f"{line.numpy_ms:.3f}"
    numpy_ratio = "-" if line.numpy_ratio is None else f"{line.numpy_ratio:,.1f}x"
    return (
        f"{line.case:32} {line.unit:24} {slow:>11} {line.ours_ms:>9.3f} {line.ratio:>9,.1f}x "
        f"{numpy_ms:>9} {numpy_ratio:>10} {memory:>9} {line.ours_mib:>9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path("out/bench_credit.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    compiled = kernels.warm_up()
    warm_up_s = time.perf_counter() - start
    print(f"kernels: {kernels.backend()}, warmed up in {warm_up_s:.1f} s; one thread\n")
    print(HEAD, flush=True)
    lines = []
    for name in options.only:
        for line in CASES[name](options.repeats):
            print(row_of(line), flush=True)
            lines.append(line)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "compiled": compiled,
        "warm_up_s": warm_up_s,
        "lines": [
            asdict(line) | {"ratio": line.ratio, "numpy_ratio": line.numpy_ratio} for line in lines
        ],
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
