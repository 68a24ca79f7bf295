"""The tree layout gives each sequence the same context as the sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep_bindings.engines.prefix_tree import build_prefix_trees

sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(np.array), min_size=1, max_size=40
)


@settings(max_examples=100, deadline=None)
@given(sequences, st.integers(1, 40))
def test_every_token_sees_its_own_prefix_and_nothing_else(
    items: list[np.ndarray], row_length: int
) -> None:
    trees = build_prefix_trees(items, row_length=row_length)
    mask = trees.attention_mask()
    length = trees.token_ids.shape[1]
    for index, tokens in enumerate(items):
        nodes = trees.nodes[trees.offsets[index] : trees.offsets[index + 1]]
        row = nodes[0] // length
        assert (nodes // length == row).all()
        np.testing.assert_array_equal(trees.token_ids.ravel()[nodes], tokens)
        np.testing.assert_array_equal(trees.position_ids.ravel()[nodes], np.arange(len(tokens)))
        for depth, node in enumerate(nodes):
            seen = np.flatnonzero(mask[row, node % length])
            np.testing.assert_array_equal(seen, np.sort(nodes[: depth + 1] % length))


def test_equal_sequences_are_computed_once() -> None:
    trees = build_prefix_trees([np.arange(10)] * 50, row_length=16)
    assert trees.num_nodes == 10
    assert trees.token_ids.shape == (1, 16)


def test_padding_sees_itself_alone() -> None:
    mask = build_prefix_trees([np.array([5])], row_length=4).attention_mask()
    np.testing.assert_array_equal(mask[0], np.eye(4, dtype=bool))


def test_hidden_states_equal_those_of_a_plain_pass() -> None:
    torch = pytest.importorskip("torch", reason="needs the 'trainers' extra")
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=50,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                attn_implementation="sdpa",
            )
        ).eval()
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 50, 9)
    items = [np.concatenate([stem[:cut], rng.integers(0, 50, 5)]) for cut in (9, 9, 4, 0, 7)]
    trees = build_prefix_trees(items, row_length=24)
    with torch.inference_mode():
        packed = model.model(
            input_ids=torch.from_numpy(trees.token_ids),
            position_ids=torch.from_numpy(trees.position_ids),
            attention_mask=torch.from_numpy(trees.attention_mask())[:, None],
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        for index, tokens in enumerate(items):
            alone = model.model(input_ids=torch.from_numpy(tokens)[None]).last_hidden_state[0]
            nodes = trees.nodes[trees.offsets[index] : trees.offsets[index + 1]]
            torch.testing.assert_close(packed[torch.from_numpy(nodes)], alone)
