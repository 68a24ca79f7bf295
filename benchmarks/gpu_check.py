"""Everything that needs a GPU, tried on one, in at most eight minutes: a table of what works and how fast.

    python benchmarks/gpu_check.py [--python VLLM_PYTHON] [--json FILE]

Nothing is downloaded: the model is built from a config. Tried: an actor's engine (vLLM where it is installed, else
transformers) and its log-probabilities beside the trainer's; new weights by shared memory, by the wire and from GPU memory
(CUDA IPC on one GPU, NCCL on two); a LoRA adapter; two iterations of GiGPO, and two asynchronous ones. Without a GPU it
says so and ends with 0; it ends with 1 when something that was tried failed. `--anyway` tries what runs on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

TIME_LIMIT_S = 8 * 60
NO_MORE_AFTER_S = 6 * 60
"""What has not begun by then is left out."""
TOLERANCE = 0.15
"""Nats per token; what bfloat16 explains."""
WORDS = [
    "a",
    "room",
    "with",
    "one",
    "door",
    "to",
    "the",
    "north",
    "and",
    "a",
    "key",
    "on",
    "the",
    "table",
    "near",
    "the",
    "red",
    "lamp",
]
SYSTEM = "Find the key, then the door."


class Table:
    """What was tried, what came of it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.rows: list[tuple[str, str, str]] = []

    def add(self, what: str, result: str, numbers: str = "") -> None:
        self.rows.append((what, result, numbers))
        print(f"  {what:<44} {result:<8} {numbers}", flush=True)

    def attempt(self, what: str, work: Callable[[], str]) -> None:
        """Run `work`, which gives its numbers; a failure is a row of the table, and its traceback is shown."""
        if time.monotonic() - self.began > NO_MORE_AFTER_S:
            self.add(what, "left out", "no time")
            return
        try:
            began = time.monotonic()
            numbers = work()
            self.add(what, "ok", f"{numbers}   [{time.monotonic() - began:.1f} s]")
        except Exception as error:
            traceback.print_exc()
            self.add(what, "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")

    @property
    def has_failed(self) -> bool:
        return any(result == "FAILED" for _, result, _ in self.rows)


def build(device: str) -> tuple[Any, Any]:
    """About 100 million parameters on a GPU, fewer on a CPU."""
    import torch

    from longstep_trainers.model import build_embedded

    is_cuda = device == "cuda"
    model, tokenizer = build_embedded(
        [SYSTEM, f"You see {' '.join(WORDS)}."],
        hidden_size=1024 if is_cuda else 64,
        num_layers=8 if is_cuda else 1,
        num_heads=16 if is_cuda else 2,
        max_length=1024,
    )
    return model.to(device, torch.bfloat16 if is_cuda else torch.float32), tokenizer


def requests(number: int, max_tokens: int) -> list[Any]:
    from longstep.types import GenerationRequest, Message, Prompt

    rng = np.random.default_rng(number)
    texts = [f"You see {' '.join(rng.choice(WORDS, 24))}." for _ in range(number)]
    return [
        GenerationRequest(
            request_id=f"{number}:{index}",
            prompt=Prompt(messages=(Message(role="user", content=text),)),
            max_tokens=max_tokens,
            seed=index,
        )
        for index, text in enumerate(texts)
    ]


def play(policy: Any, number: int, max_tokens: int = 64) -> tuple[list[Any], float]:
    """Completions of some requests, and seconds."""
    began = time.monotonic()
    policy.submit(requests(number, max_tokens))
    done: list[Any] = []
    while len(done) < number:
        done += policy.poll(1.0)
    errors = [each.error for each in done if each.error is not None]
    if errors:
        raise RuntimeError(errors[0])
    return done, time.monotonic() - began


class Check:
    """An actor with the model, and the trainer's copy of it."""

    def __init__(self, policy: Any, model: Any, rows: list[Any]) -> None:
        self.policy, self.model = policy, model
        self.pairs = [(each.prompt_token_ids, each.token_ids) for each in rows]
        self.version = 0

    def change_weights(self) -> None:
        """Something that an optimizer's step could have done, but larger."""
        import torch

        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.version += 1

    def gap(self) -> float:
        """Mean difference per token between the actor's log-probabilities and those of the trainer's model."""
        from longstep_bindings.actors import ScoreRow
        from longstep_trainers.forward import completion_logprobs

        rows = [ScoreRow(prompt_token_ids=p, token_ids=c) for p, c in self.pairs]
        (scores,) = self.policy.pool.score(rows).values()
        wanted = completion_logprobs(self.model, self.pairs)
        return float(np.abs(np.concatenate(scores) - np.concatenate(wanted)).mean())

    def transfer(self, send: Callable[[int], None]) -> str:
        """Change the weights, see that the actor differs, send them, see that it agrees."""
        self.change_weights()
        before = self.gap()
        began = time.monotonic()
        send(self.version)
        seconds = time.monotonic() - began
        after = self.gap()
        completions, _ = play(self.policy, 8, 4)
        versions = {each.policy_version for each in completions}
        if not after < TOLERANCE < before or versions != {self.version}:
            raise RuntimeError(
                f"expected a gap of {before:.3f} to fall below {TOLERANCE} and version {self.version}, got "
                f"{after:.3f} and {versions}"
            )
        return f"{seconds:.2f} s, gap {before:.3f} -> {after:.4f}"


def send_by_ipc(check: Check) -> Callable[[int], None]:
    """vLLM's CUDA IPC transfer, with our client."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    from longstep_bindings.actors.device import ActorWeightSyncClient

    client = ActorWeightSyncClient(check.policy.pool)
    engine = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0), client=client, source=ModuleSource(check.model)
    )

    def send(version: int) -> None:
        client.version = version
        engine.send_weights()
        check.policy.pool.updated_on_device(version)

    return send


@contextmanager
def actor(
    engine: str, model: Any, tokenizer: Any, options: dict[str, Any], others: dict[str, Any]
) -> Iterator[Any]:
    from longstep_bindings.actors import open_policy

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with open_policy(folder, engine=engine, options=options, **others) as policy:
            yield policy


def check_actor(table: Table, engine: str, device: str, others: dict[str, Any]) -> None:
    """Engine, log-probabilities, transfers."""
    import torch

    model, tokenizer = build(device)
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    options: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch.")}
    knows_device = engine == "vllm" and importlib.util.find_spec("vllm") and num_gpus
    if engine == "vllm" and num_gpus:
        options["gpu_memory_utilization"] = 0.3
    if knows_device:
        options["weight_transfer"] = "nccl" if num_gpus > 1 else "ipc"
    if num_gpus > 1:
        others = {**others, "environ": {"CUDA_VISIBLE_DEVICES": "1"}}
    with actor(engine, model, tokenizer, options, others) as policy:
        rows, _ = play(policy, 16)
        check = Check(policy, model, rows)

        def speed() -> str:
            number = 256 if device == "cuda" else 32
            completions, seconds = play(policy, number)
            tokens = sum(len(each.token_ids) for each in completions)
            return f"{tokens / seconds:,.0f} tokens/s, {number} requests of up to 64 tokens"

        def agreement() -> str:
            gap = check.gap()
            if not gap < TOLERANCE:
                raise RuntimeError(f"expected a gap below {TOLERANCE}, got {gap:.3f}")
            return f"gap {gap:.4f} nats per token"

        table.attempt(f"generate ({engine})", speed)
        table.attempt("log-probabilities beside the trainer's", agreement)
        for route in ("shared_memory", "wire"):
            table.attempt(
                f"weights by {route}",
                lambda route=route: check.transfer(
                    lambda version: policy.update_weights(model, version, route=route)
                ),
            )
        if knows_device and num_gpus > 1:
            table.attempt(
                "weights by NCCL",
                lambda: check.transfer(
                    lambda version: policy.update_weights(model, version, route="cuda")
                ),
            )
        elif knows_device:
            table.attempt("weights by CUDA IPC", lambda: check.transfer(send_by_ipc(check)))
        else:
            table.add("weights from GPU memory", "left out", "needs vLLM here and a GPU")


def check_adapter(table: Table, engine: str, device: str, others: dict[str, Any]) -> None:
    """An adapter in place of weights."""
    from longstep_trainers.model import apply_lora

    model, tokenizer = build(device)
    options: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch.")}
    options["max_adapter_rank"] = 8
    if engine == "vllm" and device == "cuda":
        options["gpu_memory_utilization"] = 0.3

    def work() -> str:
        with actor(engine, model, tokenizer, options, others) as policy:
            rows, _ = play(policy, 16)
            adapted = apply_lora(model, r=8, alpha=16)
            check = Check(policy, adapted, rows)

            def fill() -> None:
                import torch

                torch.manual_seed(0)
                with torch.no_grad():
                    for name, parameter in adapted.named_parameters():
                        if "lora_B" in name:
                            parameter.copy_(0.5 * torch.randn_like(parameter))
                check.version += 1

            check.change_weights = fill  # type: ignore[method-assign]
            return check.transfer(lambda version: policy.update_adapter(adapted, version))

    table.attempt("LoRA adapter", work)


def check_training(table: Table, engine: str, others: dict[str, Any], max_staleness: int) -> None:
    """Two iterations of `longstep train`."""
    from longstep_trainers import config as settings
    from longstep_trainers import group
    from longstep_trainers.tracking import read_metrics

    def work() -> str:
        with tempfile.TemporaryDirectory() as folder:
            group.train(
                settings.RunConfig(
                    model=settings.ModelConfig(
                        embedded=settings.EmbeddedModelConfig(hidden_size=128, num_layers=2)
                    ),
                    env=settings.EnvConfig(
                        kwargs={"size": 4, "num_rooms": 1, "max_steps": 24},
                        prompt=settings.PromptConfig(system="", user="{current_observation}"),
                        memory=settings.MemoryConfig(name="window", window_size=0),
                        rollout=settings.RolloutConfig(n=8, batch_size=64),
                    ),
                    train=settings.TrainConfig(
                        total_steps=64 * 24 + 1,
                        learning_rate=1e-4,
                        max_length=128,
                        eval_every=0,
                        eval_tasks=8,
                        save_every=0,
                    ),
                    generation=settings.GenerationConfig(constrain=True, max_tokens=4),
                    actor=settings.ActorConfig(
                        engine=engine,
                        num_actors=1,
                        max_staleness=max_staleness,
                        python=others.get("python"),
                        gpu_memory_share=0.3,
                    ),
                    log_level="ERROR",
                    output_dir=folder,
                )
            )
            metrics = read_metrics(Path(folder) / "metrics.jsonl")[1:]
            timings = read_metrics(Path(folder) / "timings.jsonl")[-1]
        gap = max(record["importance/abs_logprob_gap"] for record in metrics)
        return (
            f"{len(metrics)} iterations, rollout {timings['time/rollout_s']:.1f} s, update "
            f"{timings['time/update_s']:.1f} s, transfer {timings['time/weight_transfer_s']:.2f} s, gap {gap:.4f}"
        )

    name = "asynchronous GiGPO" if max_staleness else "GiGPO"
    table.attempt(f"{name} (staleness {max_staleness})", work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--python", help="interpreter of the actors, where vLLM is in another one")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="default: as installed")
    parser.add_argument("--anyway", action="store_true", help="without a GPU, try what runs there")
    parser.add_argument("--json", type=Path, help="where to write the table too")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not options.anyway:
        print("no CUDA device here: nothing to check (`--anyway` tries what runs on a CPU)")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    has_vllm = options.python is not None or importlib.util.find_spec("vllm") is not None
    engine = options.engine or ("vllm" if has_vllm else "transformers")
    others = {"python": options.python, "start_timeout_s": 240.0}
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, engine {engine}; at most {TIME_LIMIT_S // 60} minutes"
    )
    table = Table()
    for what, check in (
        ("actor", lambda: check_actor(table, engine, device, others)),
        ("adapter", lambda: check_adapter(table, engine, device, others)),
        ("training", lambda: check_training(table, engine, others, 0)),
        ("training", lambda: check_training(table, engine, others, 1)),
    ):
        try:
            check()
        except Exception as error:  # what could not even be begun
            traceback.print_exc()
            table.add(what, "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    print(f"{time.monotonic() - table.began:.0f} s in all", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table.rows, indent=1))
    return int(table.has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
