"""The group trainer as a user runs it: it trains, resumes bit for bit, stops on a signal, and says what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'trainers' extra")

from longstep.errors import ConfigError, EnvError  # noqa: E402
from longstep_trainers import group  # noqa: E402
from longstep_trainers.config import (  # noqa: E402
    AlgorithmConfig,
    EmbeddedModelConfig,
    EnvConfig,
    GenerationConfig,
    GiGPOConfig,
    MemoryConfig,
    ModelConfig,
    PromptConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from longstep_trainers.tracking import read_metrics  # noqa: E402

FLAGS = [
    *(
        "--env.name",
        "longstep/KeyDoor-v0",
        "--env.kwargs",
        "{size: 3, num_rooms: 1, max_steps: 18}",
    ),
    *("--env.prompt.user", "{current_observation}", "--env.prompt.system", ""),
    *("--env.rollout.n", "4", "--env.rollout.batch_size", "16", "--generation.constrain", "true"),
    *("--generation.max_tokens", "4", "--train.max_length", "64", "--train.batch_size", "64"),
    *("--model.embedded.hidden_size", "32", "--model.embedded.num_layers", "1"),
    *("--model.embedded.num_heads", "1", "--train.learning_rate", "3e-3"),
    *("--train.eval_tasks", "8", "--train.eval_every", "2", "--train.save_every", "1"),
]


def config(output_dir: Path, **train: object) -> RunConfig:
    """A run of a few seconds."""
    defaults: dict[str, object] = {
        "total_steps": 400,
        "learning_rate": 3e-3,
        "batch_size": 64,
        "max_length": 64,
        "eval_tasks": 8,
        "save_every": 1,
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
        output_dir=str(output_dir),
    )


def start(output_dir: Path, *flags: str) -> subprocess.Popen[str]:
    """`longstep train` in a process of its own."""
    command = [sys.executable, "-m", "longstep", "train", *FLAGS, "--output_dir", str(output_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_checkpoint(output_dir: Path, process: subprocess.Popen[str], iteration: int) -> None:
    """Return when the checkpoint of an iteration is complete."""
    for _ in range(1200):
        if (output_dir / "checkpoints" / f"iteration-{iteration:06d}").exists():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no checkpoint within 120 s")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_training_writes_metrics_model_checkpoint_and_summary(tmp_path: Path) -> None:
    summary = group.train(config(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["env_steps"] >= 400
    assert 0 <= summary["eval_success_before"] <= 1
    assert len(summary["panel_sha256"]) == 64
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["iteration"] for record in records] == list(range(summary["iterations"] + 1))
    last = records[-1]
    for name in ("rollout/success_rate", "train/policy_loss", "train/grad_norm", "train/entropy"):
        assert np.isfinite(last[name])
    # The first mini-batch of an iteration is on-policy, so the sampler's and the trainer's numbers agree.
    assert records[1]["train/kl_to_sampler"] < 1e-2
    assert (tmp_path / "model" / "model.safetensors").exists()
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_weights_change_and_the_embedded_model_starts_the_same(tmp_path: Path) -> None:
    first = group.train(config(tmp_path / "a"))
    second = group.train(config(tmp_path / "b"))
    del first["train_seconds"], second["train_seconds"]
    assert first == second
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert digest(tmp_path / "a" / name) == digest(tmp_path / "b" / name)


def test_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", "--train.total_steps", "1200")
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output
    killed = start(tmp_path / "killed", "--train.total_steps", "1200")
    wait_for_checkpoint(tmp_path / "killed", killed, 2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    resumed = start(tmp_path / "killed", "--train.total_steps", "1200", "--resume", "auto")
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert digest(tmp_path / "whole" / name) == digest(tmp_path / "killed" / name), name


def test_interrupt_saves_and_exits_cleanly(tmp_path: Path) -> None:
    process = start(tmp_path, "--train.total_steps", "1000000")
    wait_for_checkpoint(tmp_path, process, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "--resume auto" in output
    assert "Traceback" not in output
    newest = sorted((tmp_path / "checkpoints").glob("iteration-*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert state["iteration"] >= records[-1]["iteration"] >= 1


def test_kl_penalty_keeps_the_policy_near_the_reference(tmp_path: Path) -> None:
    divergences = []
    for coefficient in (1e-6, 10.0):
        folder = tmp_path / str(coefficient)
        group.train(config(folder, kl_coef=coefficient, learning_rate=1e-2, total_steps=900))
        last = read_metrics(folder / "metrics.jsonl")[-1]
        divergences.append(last["train/kl_to_reference"])
    assert 0 <= divergences[1] < 0.5 * divergences[0]


def test_lora_trains_the_adapter_alone_and_resumes(tmp_path: Path) -> None:
    from dataclasses import replace

    base = config(tmp_path, kl_coef=0.01)
    lora = replace(base, model=replace(base.model, use_lora=True, lora_r=4))
    group.train(lora)
    assert (tmp_path / "model" / "adapter_model.safetensors").exists()
    longer = replace(lora, resume="auto", train=replace(lora.train, total_steps=700))
    assert group.train(longer)["env_steps"] >= 700


def test_grpo_has_no_step_groups(tmp_path: Path) -> None:
    from dataclasses import replace

    run = replace(config(tmp_path, total_steps=200), algorithm=AlgorithmConfig(name="grpo"))
    group.train(run)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["credit/step_group_size_mean"] == 0


def test_debug_shows_prompt_and_completion_of_each_step(tmp_path: Path) -> None:
    process = start(tmp_path, "--train.total_steps", "50", "--log_level", "DEBUG")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "you " in output
    assert "[completion]" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.lerning_rate", "1"], "learning_rate"),
        (["--env.rollout.n", "-4"], "env.rollout.n"),
        (["--env.rollout.n", "5"], "inner_group_size"),
        (["--model.model_path", "/no/such/folder"], "does not exist"),
        (["--env.name", "longstep/KeyDor-v0"], "longstep/KeyDoor-v0"),
    ],
)
def test_wrong_setting_is_one_clear_line(tmp_path: Path, flags: list[str], message: str) -> None:
    process = start(tmp_path, *flags)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in (1, 2)
    assert message in output.splitlines()[-1]
    assert "Traceback" not in output


def test_output_folder_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    group.train(config(tmp_path, total_steps=50))
    with pytest.raises(ConfigError, match="--resume auto"):
        group.train(config(tmp_path, total_steps=50))


def test_a_run_is_not_gone_on_with_under_another_seed(tmp_path: Path) -> None:
    from dataclasses import replace

    first = config(tmp_path, total_steps=50)
    group.train(first)
    with pytest.raises(
        ConfigError, match=f"got {first.seed + 1} instead of {first.seed} at `seed`"
    ):
        group.train(replace(first, seed=first.seed + 1, resume="auto"))


def test_unequal_inner_group_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="inner_group_size"):
        RunConfig(
            env=EnvConfig(rollout=RolloutConfig(n=6)),
            algorithm=AlgorithmConfig(gigpo=GiGPOConfig(inner_group_size=4)),
        )


def test_environment_of_four_values_fails_with_its_name(tmp_path: Path) -> None:
    from dataclasses import replace

    import longstep

    class FourValues(longstep.envs.KeyDoorEnv):  # type: ignore[name-defined]
        def step(self, action: str):  # type: ignore[no-untyped-def]
            return super().step(action)[:4]

    longstep.register("test/FourValues-v0", FourValues, kwargs={"size": 3, "num_rooms": 1})
    try:
        base = config(tmp_path)
        run = replace(base, env=replace(base.env, name="test/FourValues-v0", kwargs={}))
        with pytest.raises(EnvError, match=r"five|5"):
            group.train(run)
    finally:
        longstep.registry.remove("test/FourValues-v0")
