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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from learning import half_interval, mean_success, read_curve, run

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
    curves = {each: read_curve(run_folder(options.out, *each)) for each in runs}
    text = report(curves, options.seeds)
    print(text)
    (options.out / "learning_actors.md").write_text(text)


def run_folder(out: Path, seed: int, engine: str) -> Path:
    return out / f"{engine}-{seed}"


def train(options: argparse.Namespace, seed: int, engine: str) -> None:
    """One run of this comparison."""
    actor = ["--actor.engine", "vllm", "--actor.num_actors", "1", "--actor.python", options.python]
    flags = [
        *("--seed", str(seed), "--train.save_every", "0", "--train.eval_every", "2"),
        *("--train.total_steps", str(options.steps)),
        *(actor if engine == "vllm" else []),
        *options.flags,
    ]
    run(run_folder(options.out, seed, engine), "demo", flags)


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


if __name__ == "__main__":
    main()
