"""GiGPO against GRPO: environment steps to 0.8 held-out success, same everything else, several seeds.

    python benchmarks/learning.py --out out/learning            # both tasks, 5 seeds each
    python benchmarks/learning.py --tasks keydoor --seeds 3

Each run is `longstep train` with the packaged configuration `learning_<task>` in a process of its own with one thread;
as many run at a time as there are processors. Runs that are already in the output folder are not repeated. Writes
`learning.json`, `learning.md` (the table) and `learning.png`.

Unit: environment steps. Baseline: GRPO, same seeds, in the same call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

TASKS = ("keydoor", "sokoban")
ALGORITHMS = ("gigpo", "grpo")
THRESHOLD = 0.8


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("out/learning"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, at least 2")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("flags", nargs="*", help="further flags of `longstep train`, after --")
    options = parser.parse_args(arguments)
    runs = list(product(options.tasks, range(options.seeds), ALGORITHMS))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: train(options.out, *run, options.flags), runs))
    curves = {each: read_curve(run_folder(options.out, *each)) for each in runs}
    table = [
        summarise(task, algorithm, [curves[task, seed, algorithm] for seed in range(options.seeds)])
        for task, algorithm in product(options.tasks, ALGORITHMS)
    ]
    text = markdown(table)
    print(text)
    (options.out / "learning.md").write_text(text)
    (options.out / "learning.json").write_text(json.dumps(table, indent=2) + "\n")
    plot(options.out / "learning.png", options.tasks, options.seeds, curves)


def run_folder(out: Path, task: str, seed: int, algorithm: str) -> Path:
    return out / f"{task}-{algorithm}-{seed}"


def train(out: Path, task: str, seed: int, algorithm: str, flags: Sequence[str]) -> None:
    """One run of this comparison."""
    wanted = ["--algorithm.name", algorithm, "--seed", str(seed), "--resume", "auto"]
    run(run_folder(out, task, seed, algorithm), f"learning_{task}", [*wanted, *flags])


def run(folder: Path, config: str, flags: Sequence[str]) -> None:
    """`longstep train` with a packaged configuration into a folder, unless the folder is complete already."""
    if (folder / "summary.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "longstep", "train", "--config", config),
        *("--output_dir", str(folder), *flags),
    ]
    with folder.with_suffix(".log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True)
    print(f"{folder.name}: {json.loads((folder / 'summary.json').read_text())}", flush=True)


def read_curve(folder: Path) -> np.ndarray:
    """[K, 2] environment steps and held-out success of each evaluation of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    points = [(r["env_steps"], r["eval/success_rate"]) for r in records if "eval/success_rate" in r]
    return np.array(points)


def steps_to_threshold(curve: np.ndarray) -> float:
    """Environment steps at the first evaluation at or above the threshold; infinite when there is none."""
    reached = np.flatnonzero(curve[:, 1] >= THRESHOLD)
    return float(curve[reached[0], 0]) if reached.size else float("inf")


def mean_success(curve: np.ndarray) -> float:
    """Success over the whole run: the area under the curve, which every seed has."""
    steps, success = curve.T
    return float(np.trapezoid(success, steps) / (steps[-1] - steps[0]))


def summarise(task: str, algorithm: str, curves: Sequence[np.ndarray]) -> dict[str, object]:
    finals = np.array([curve[-1, 1] for curve in curves])
    areas = np.array([mean_success(curve) for curve in curves])
    steps = np.array([steps_to_threshold(curve) for curve in curves])
    return {
        "task": task,
        "algorithm": algorithm,
        "seeds": len(curves),
        "steps_to_threshold": [None if np.isinf(s) else s for s in steps],
        "median_steps": None if np.isinf(np.median(steps)) else float(np.median(steps)),
        "area": [float(areas.mean()), half_interval(areas)],
        "final": [float(finals.mean()), half_interval(finals)],
    }


def half_interval(values: np.ndarray) -> float:
    """Half the 95% interval of the mean by Student's t."""
    # Quantiles 0.975 for 1 to 30 degrees of freedom.
    quantiles = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
    degrees = len(values) - 1
    quantile = quantiles[degrees - 1] if degrees <= len(quantiles) else 2.0
    return float(quantile * values.std(ddof=1) / np.sqrt(len(values)))


def markdown(table: Sequence[dict]) -> str:
    lines = [
        f"| task | algorithm | median env steps to {THRESHOLD} | each seed | mean success over the run | final success |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in table:
        each = ", ".join(
            "never" if s is None else f"{s / 1000:.0f}k" for s in row["steps_to_threshold"]
        )
        median = "not reached" if row["median_steps"] is None else f"{row['median_steps']:,.0f}"
        area, final = row["area"], row["final"]
        lines.append(
            f"| {row['task']} | {row['algorithm']} | {median} | {each} "
            f"| {area[0]:.3f} ± {area[1]:.3f} | {final[0]:.3f} ± {final[1]:.3f} |"
        )
    by_key = {(row["task"], row["algorithm"]): row["median_steps"] for row in table}
    for task in dict.fromkeys(row["task"] for row in table):
        gigpo, grpo = by_key[task, "gigpo"], by_key[task, "grpo"]
        if gigpo is None or grpo is None:
            missing = "GiGPO" if gigpo is None else "GRPO"
            lines.append(f"\n{task}: no ratio, {missing} does not reach {THRESHOLD} in the median.")
        else:
            lines.append(f"\n{task}: GiGPO needs {gigpo / grpo:.2f} of GRPO's steps in the median.")
    return "\n".join(lines) + "\n"


def plot(path: Path, tasks: Sequence[str], seeds: int, curves: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tasks), figsize=(5 * len(tasks), 3.5), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for algorithm, color in zip(ALGORITHMS, ("tab:blue", "tab:orange"), strict=True):
            runs = [curves[task, seed, algorithm] for seed in range(seeds)]
            grid = np.linspace(0, min(run[-1, 0] for run in runs), 100)
            values = np.array([np.interp(grid, run[:, 0], run[:, 1]) for run in runs])
            for value in values:
                axis.plot(grid, value, color=color, alpha=0.25, linewidth=0.8)
            axis.plot(grid, values.mean(axis=0), color=color, label=algorithm)
        axis.axhline(THRESHOLD, color="gray", linewidth=0.8, linestyle=":")
        axis.set(title=task, xlabel="environment steps", ylabel="held-out success", ylim=(0, 1.02))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
