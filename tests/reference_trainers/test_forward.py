"""Forward passes agree with each other, and importance weights are taken against them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'trainers' extra")

from longstep_trainers import group  # noqa: E402
from longstep_trainers.batching import Rows, minibatches, pack  # noqa: E402
from longstep_trainers.config import ActorConfig, RunConfig, TrainConfig  # noqa: E402
from longstep_trainers.forward import completion_logprobs, loss_token_logprobs  # noqa: E402
from longstep_trainers.model import build_embedded  # noqa: E402


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    made, _ = build_embedded(["a b c d"], hidden_size=32, num_layers=1, num_heads=1, max_length=64)
    return made


@pytest.fixture
def rows(model: torch.nn.Module) -> Rows:
    """Rows that share beginnings, with the log-probabilities of the model itself."""
    rng = np.random.default_rng(0)
    stem = rng.integers(6, 200, 6)
    prompts = [np.append(stem[: rng.integers(1, 7)], rng.integers(6, 200, 3)) for _ in range(9)]
    completions = [rng.integers(6, 200, rng.integers(1, 5)) for _ in range(9)]
    made = Rows(
        prompt_token_ids=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]),
        completion_token_ids=np.concatenate(completions).astype(np.int32),
        completion_offsets=np.cumsum([0, *map(len, completions)]),
        logprobs=np.zeros(sum(map(len, completions)), np.float32),
        advantages=np.ones(9, np.float32),
        weights=np.ones(9, np.float32),
    )
    found = completion_logprobs(model, [(made.prompt(i), made.completion(i)) for i in range(9)])
    return replace(made, logprobs=np.concatenate(found))


def settings(**train: float) -> RunConfig:
    return RunConfig(train=TrainConfig(**train), actor=ActorConfig(num_actors=1))  # type: ignore[arg-type]


def test_packed_rows_and_rows_one_by_one_have_the_same_log_probabilities(
    model: torch.nn.Module, rows: Rows
) -> None:
    parts = pack(rows, np.arange(9), max_tokens=64, row_length=32, use_trees=True)
    seen = 0
    with torch.no_grad():
        for part in parts:
            logprobs, _ = loss_token_logprobs(model, part, 1.0)
            np.testing.assert_allclose(
                logprobs.numpy(), rows.logprobs[part.tokens_M], rtol=0, atol=1e-5
            )
            seen += len(part.tokens_M)
    assert seen == len(rows.completion_token_ids)


def test_the_sampler_itself_has_nothing_to_correct(model: torch.nn.Module, rows: Rows) -> None:
    parts = list(minibatches(9, 4, np.random.default_rng(0)))
    corrected, metrics = group._with_importance(rows, model, parts, settings())
    assert corrected.importance is not None
    np.testing.assert_allclose(corrected.importance, 1.0, atol=1e-4)
    assert metrics["importance/abs_logprob_gap"] < 1e-5
    assert metrics["importance/truncated_share"] == 0
    assert metrics["importance/effective_sample_share"] == pytest.approx(1.0, abs=1e-6)


def test_what_another_policy_sampled_is_weighted_and_the_weight_is_capped(
    model: torch.nn.Module, rows: Rows
) -> None:
    # The sampler found even tokens twice and odd ones a quarter as probable as the model does.
    factor = np.where(np.arange(len(rows.logprobs)) % 2 == 0, 2.0, 0.25).astype(np.float32)
    sampled = replace(rows, logprobs=rows.logprobs + np.log(factor))
    parts = list(minibatches(9, 4, np.random.default_rng(0)))
    corrected, metrics = group._with_importance(sampled, model, parts, settings(importance_cap=3.0))
    np.testing.assert_allclose(corrected.logprobs, rows.logprobs, atol=1e-5)
    wanted = np.where(factor == 2.0, 0.5, 3.0)
    np.testing.assert_allclose(corrected.importance, wanted, atol=1e-4)
    assert metrics["importance/truncated_share"] == pytest.approx((factor == 0.25).mean())
    gap = np.abs(np.log(factor)).mean()
    assert metrics["importance/abs_logprob_gap"] == pytest.approx(gap, abs=1e-4)
    share = wanted.sum() ** 2 / (len(wanted) * (wanted**2).sum())
    assert metrics["importance/effective_sample_share"] == pytest.approx(share, abs=1e-4)


def test_the_loss_of_a_token_is_multiplied_by_its_importance(
    model: torch.nn.Module, rows: Rows
) -> None:
    weights = np.linspace(0.2, 2.0, len(rows.logprobs)).astype(np.float32)
    losses: list[list[float]] = []
    for importance in (None, weights):
        weighted = replace(rows, importance=importance)
        found = np.zeros(len(weights))
        for token in range(len(weights)):
            row = int(np.searchsorted(rows.completion_offsets, token, side="right")) - 1
            (part,) = pack(weighted, np.array([row]), max_tokens=64, row_length=32, use_trees=True)
            kept = part.tokens_M == token
            masked = replace(part, weights_M=part.weights_M * kept)
            loss, _ = group._loss(model, None, masked, settings())
            found[token] = loss.item()
        losses.append(found.tolist())
    np.testing.assert_allclose(np.array(losses[1]), np.array(losses[0]) * weights, rtol=1e-5)
