"""Packed micro-batches carry every row once and give the log-probabilities of a plain pass."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'trainers' extra")

from longstep.errors import ConfigError, DataError  # noqa: E402
from longstep_trainers.batching import Rows, minibatches, pack  # noqa: E402


def make_rows(rng: np.random.Generator, num_rows: int, *, constrained: bool) -> Rows:
    stem = rng.integers(0, 40, 8)
    prompts = [
        np.concatenate([stem[: rng.integers(0, 8)], rng.integers(0, 40, rng.integers(1, 5))])
        for _ in range(num_rows)
    ]
    completions = [rng.integers(0, 40, rng.integers(1, 4)) for _ in range(num_rows)]
    flat = np.concatenate(completions)
    allowed = [
        np.unique(np.append(rng.integers(0, 40, rng.integers(0, 3)), token)) for token in flat
    ]
    return Rows(
        prompt_token_ids=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]),
        completion_token_ids=flat.astype(np.int32),
        completion_offsets=np.cumsum([0, *map(len, completions)]),
        logprobs=-rng.random(len(flat)).astype(np.float32),
        advantages=rng.standard_normal(num_rows).astype(np.float32),
        weights=np.ones(num_rows, dtype=np.float32),
        allowed_token_ids=np.concatenate(allowed).astype(np.int32) if constrained else None,
        allowed_offsets=np.cumsum([0, *map(len, allowed)]) if constrained else None,
    )


@pytest.mark.parametrize("use_trees", [True, False])
@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("max_tokens", [24, 1000])
def test_each_loss_token_appears_once_with_its_own_numbers(
    use_trees: bool, constrained: bool, max_tokens: int
) -> None:
    rows = make_rows(np.random.default_rng(1), 30, constrained=constrained)
    selected = np.arange(0, 30, 2)
    parts = pack(rows, selected, max_tokens=max_tokens, row_length=16, use_trees=use_trees)
    seen = []
    for part in parts:
        assert part.token_ids_BL.numel() <= max_tokens
        for position, token in enumerate(part.tokens_M.tolist()):
            row = int(np.searchsorted(rows.completion_offsets, token, side="right")) - 1
            seen.append(token)
            assert part.advantages_M[position] == rows.advantages[row]
            assert part.old_logprobs_M[position] == rows.logprobs[token]
            target = part.targets_M[position]
            if part.allowed_MA is not None:
                target = part.allowed_MA[position, target]
            assert target == rows.completion_token_ids[token]
            within = token - rows.completion_offsets[row]
            before = np.append(rows.prompt(row), rows.completion(row)[:within])[-1]
            assert part.token_ids_BL.flatten()[part.sources_M[position]] == before
    choices = rows.num_choices()
    expected = [
        token
        for row in selected
        for token in range(rows.completion_offsets[row], rows.completion_offsets[row + 1])
        if choices[token] > 1
    ]
    assert sorted(seen) == expected
    assert len(expected) == rows.num_loss_tokens(selected)


def test_rows_of_weight_zero_change_nothing() -> None:
    rows = make_rows(np.random.default_rng(2), 10, constrained=True)
    weights = np.ones(10, dtype=np.float32)
    weights[5:] = 0
    from dataclasses import replace

    half = replace(rows, weights=weights)
    everything = np.arange(10)
    kept = pack(half, everything, max_tokens=500, row_length=64, use_trees=True)
    alone = pack(rows, everything[:5], max_tokens=500, row_length=64, use_trees=True)
    assert half.num_loss_tokens(everything) == rows.num_loss_tokens(everything[:5])
    for one, other in zip(kept, alone, strict=True):
        assert torch.equal(one.token_ids_BL, other.token_ids_BL)
        assert torch.equal(one.tokens_M, other.tokens_M)


def test_minibatches_hold_each_row_once() -> None:
    parts = list(minibatches(23, 5, np.random.default_rng(0)))
    assert [len(part) for part in parts] == [5, 5, 5, 5, 3]
    assert sorted(np.concatenate(parts)) == list(range(23))


def test_row_longer_than_the_bound_names_both_numbers() -> None:
    rows = make_rows(np.random.default_rng(3), 4, constrained=False)
    with pytest.raises(ConfigError, match=r"at most 2 tokens .* got one of \d+"):
        pack(rows, np.arange(4), max_tokens=2, row_length=2, use_trees=True)


def test_sampled_token_outside_its_allowed_ids_is_refused() -> None:
    from dataclasses import replace

    rows = make_rows(np.random.default_rng(4), 4, constrained=True)
    assert rows.allowed_token_ids is not None
    wrong = replace(rows, allowed_token_ids=rows.allowed_token_ids + 100)
    with pytest.raises(DataError, match="among its allowed ids"):
        pack(wrong, np.arange(4), max_tokens=500, row_length=64, use_trees=True)


def test_one_advantage_for_each_row_is_required() -> None:
    with pytest.raises(DataError, match="3 rows"):
        Rows.from_columns({"rewards": np.zeros(3)}, np.zeros(2))
