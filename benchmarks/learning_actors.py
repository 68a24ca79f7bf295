"""GiGPO through vLLM actors against GiGPO with the trainer's own engine: same task, same seeds, curves side by side.

    python benchmarks/learning_actors.py --out out/learning_actors --seeds 4

Each run is `longstep train --config demo`, cut to `--steps`; the other side has `--actor.engine vllm --actor.num_actors 1`
in addition. The engines draw other tokens from equal distributions, so the curves of a seed differ as those of two seeds
do: what is compared is the mean over seeds, by the paired differences and their 95% interval. Runs that are already in
the output folder are not repeated.

Unit: held-out success, at the last evaluation and as the mean over the run. Baseline: the trainer's own engine.
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
from learning import half_interval

ROOT = Path(__file__).parents[1]
ENGINES = ("own", "vllm")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("out/learning_actors"))
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds, at least 2")
    parser.add_argument("--steps", type=int, default=45_000, help="environment steps of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm/bin/python"), help="has vLLM")
    parser.add_argument("flags", nargs="*", help="further flags of `longstep train`, after --")
    options = parser.parse_args(arguments)
    runs = list(product(range(options.seeds), ENGINES))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: train(options, *run), runs))
    curves = {run: read_curve(options.out, *run) for run in runs}
    text = report(curves, options.seeds)
    print(text)
    (options.out / "learning_actors.md").write_text(text)


def run_folder(out: Path, seed: int, engine: str) -> Path:
    return out / f"{engine}-{seed}"


def train(options: argparse.Namespace, seed: int, engine: str) -> None:
    """One run, unless it is complete already."""
    folder = run_folder(options.out, seed, engine)
    if (folder / "summary.json").exists():
        return
    options.out.mkdir(parents=True, exist_ok=True)
    actor = ["--actor.engine", "vllm", "--actor.num_actors", "1", "--actor.python", options.python]
    command = [
        *(sys.executable, "-m", "longstep", "train", "--config", "demo"),
        *("--seed", str(seed), "--output_dir", str(folder), "--train.save_every", "0"),
        *("--train.total_steps", str(options.steps), "--train.eval_every", "2"),
        *(actor if engine == "vllm" else []),
        *options.flags,
    ]
    with folder.with_suffix(".log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True)
    print(f"{folder.name}: {json.loads((folder / 'summary.json').read_text())}", flush=True)


def read_curve(out: Path, seed: int, engine: str) -> np.ndarray:
    """[K, 2] environment steps and held-out success of each evaluation."""
    lines = (run_folder(out, seed, engine) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    points = [(r["env_steps"], r["eval/success_rate"]) for r in records if "eval/success_rate" in r]
    return np.array(points)


def report(curves: dict[tuple[int, str], np.ndarray], num_seeds: int) -> str:
    lines = [
        "| success | trainer's own engine | vLLM actor | difference in pairs |",
        "| --- | --- | --- | --- |",
    ]
    measures = {"at the end": final, "mean over the run": mean_success}
    for name, measure in measures.items():
        own, vllm = (
            np.array([measure(curves[seed, engine]) for seed in range(num_seeds)])
            for engine in ENGINES
        )
        cells = [f"{v.mean():.3f} ({', '.join(f'{x:.2f}' for x in v)})" for v in (own, vllm)]
        gap = vllm - own
        lines.append(
            f"| {name} | {cells[0]} | {cells[1]} | {gap.mean():+.3f} ± {half_interval(gap):.3f} |"
        )
    return "\n".join(lines) + "\n"


def final(curve: np.ndarray) -> float:
    return float(curve[-1, 1])


def mean_success(curve: np.ndarray) -> float:
    """The area under the curve."""
    steps, success = curve.T
    return float(np.trapezoid(success, steps) / (steps[-1] - steps[0]))


if __name__ == "__main__":
    main()
