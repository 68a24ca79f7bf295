"""New weights to an actor: seconds per transfer by route and size, against a checkpoint and a reload; all in one run.

    python benchmarks/bench_weights.py [--sizes 2 30 135] [--engine transformers] [--python PATH] [--repeats 5]

Sizes are millions of parameters of a Llama built from a config with random weights, float32 at both ends. Routes:
`shared_memory` and `wire` for all weights, and a LoRA adapter of rank 16 by shared memory. A transfer counts from the call
of `update_weights` until the actor serves the new weights; after it, outside of the time, the actor's log-probabilities are
compared with those of the model that was sent.

Baselines: what one does without routes. `checkpoint + reload` writes a checkpoint (`save_pretrained`) to the temporary
folder and opens an engine from it in a process that has everything imported; `checkpoint + restart` starts a new actor
process from it. Numbers are medians, seconds; the ratio is baseline / route.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from longstep_bindings.actors import ActorPolicy, Probe, ScoreRow, open_policy
from longstep_bindings.engines.opening import open_engine
from longstep_bindings.engines.scoring import score_rows
from longstep_trainers.embedded import build_tokenizer
from longstep_trainers.model import apply_lora

WIDTHS = {2: (128, 2), 30: (512, 6), 135: (768, 14), 360: (1152, 18)}
"""Width and layers by millions of parameters, with a vocabulary of 16 thousand."""
TEXTS = ["You are in a red room. You see a key, a door and a lamp."]


def build(millions: int, vocabulary: int) -> LlamaForCausalLM:
    width, layers = WIDTHS[millions]
    config = LlamaConfig(
        vocab_size=vocabulary if millions < 10 else 16384,
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def probe(model: Any) -> Probe:
    generator = np.random.default_rng(0)
    rows = tuple(
        ScoreRow(
            prompt_token_ids=generator.integers(0, 200, 20).astype(np.int32),
            token_ids=generator.integers(0, 200, 8).astype(np.int32),
        )
        for _ in range(2)
    )
    return Probe(rows=rows, logprobs=tuple(score_rows(model, rows)), tolerance=0.05)


def nudge(model: Any, *, only: str = "") -> None:
    """Change the weights, as a step of an optimizer does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Case:
    """One size: an actor, and the routes to it."""

    def __init__(self, millions: int, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.tokenizer = build_tokenizer(TEXTS)
        self.model: Any = build(millions, len(self.tokenizer))
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.version = 0
        self.write()
        self.engine_options = dict(options.engine_options)
        if options.engine == "transformers":
            self.engine_options.setdefault("dtype", "float32")

    def write(self) -> None:
        self.model.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)

    def start(self) -> ActorPolicy:
        options = self.options
        return open_policy(
            self.folder,
            engine=options.engine,
            python=options.python,
            options=self.engine_options,
        )

    def transfers(self, policy: ActorPolicy, route: Any) -> float:
        """Median time of an update by `route`; the first warms up."""
        times: list[float] = []
        for _ in range(self.options.repeats + 1):
            nudge(self.model)
            self.version += 1
            times.append(
                seconds(lambda: policy.update_weights(self.model, self.version, route=route))
            )
            policy._check(probe(self.model))
        return median(times[1:])

    def adapters(self, policy: ActorPolicy) -> float:
        tuned = apply_lora(self.model, r=16)
        times: list[float] = []
        for _ in range(self.options.repeats + 1):
            nudge(tuned, only="lora_B")
            self.version += 1
            times.append(seconds(lambda: policy.update_adapter(tuned, self.version)))
            policy._check(probe(tuned.eval()))
        return median(times[1:])

    def reload(self) -> float:
        """Write a checkpoint and open an engine from it, in this process."""

        def work() -> None:
            self.write()
            open_engine("transformers", self.folder, **self.engine_options).close()

        return median(seconds(work) for _ in range(self.options.repeats))

    def restart(self) -> float:
        """Write a checkpoint and start an actor from it."""

        def work() -> None:
            self.write()
            self.start().close()

        return seconds(work)

    def run(self) -> dict[str, float]:
        found: dict[str, float] = {}
        with self.start() as policy:
            for route in ("shared_memory", "wire"):
                found[route] = self.transfers(policy, route)
            if self.options.engine == "transformers":
                found["checkpoint + reload"] = self.reload()
            found["checkpoint + restart"] = self.restart()
            if not self.options.no_adapter:
                found["adapter"] = self.adapters(policy)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 30, 135], choices=WIDTHS)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument(
        "--python", help="interpreter of the actor, for engines that need their own"
    )
    parser.add_argument("--no-adapter", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    print(f"engine {options.engine}; seconds, median of {options.repeats}; ratio to each baseline")
    results: dict[str, dict[str, float]] = {}
    for millions in options.sizes:
        folder = Path(tempfile.mkdtemp(prefix="longstep-bench-"))
        try:
            case = Case(millions, options, folder)
            found = case.run()
        finally:
            shutil.rmtree(folder)
        size = case.num_parameters * 4 / 2**20
        results[f"{case.num_parameters / 1e6:.1f}M"] = found
        print(f"{case.num_parameters / 1e6:.1f} million parameters, {size:.0f} MiB", flush=True)
        baselines = {name: s for name, s in found.items() if name.startswith("checkpoint")}
        for name, taken in found.items():
            ratios = [f"{slow / taken:8.1f}x" for slow in baselines.values()]
            rate = f"{size / taken:8.0f} MiB/s" if name in ("shared_memory", "wire") else ""
            told = "".join(ratios) if name not in baselines else ""
            print(f"  {name:<22}{taken:9.3f} {told} {rate}", flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
