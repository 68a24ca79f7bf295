"""The tiny model in an actor against the same model in process."""

import copy
import warnings

import numpy as np
import pytest
import torch
from actor_helpers import gather, request
from safetensors.torch import load_file, save_file

from longstep import EnginePolicy, Rollout, Task
from longstep.errors import WeightsError
from longstep.types import FinishReason
from longstep_bindings.actors import Probe, ScoreRow, open_policy
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_trainers.embedded import build_embedded, corpus_of
from longstep_trainers.model import apply_lora

ROOMS = ["red", "blue", "green", "dark", "old", "new", "wide", "small"]


@pytest.fixture(scope="module")
def policy(tiny):
    with open_policy(tiny[2], options={"dtype": "float32", "max_adapter_rank": 8}) as policy:
        yield policy


def mixed(num, prefix="r"):
    return [
        request(
            f"{prefix}{i}",
            f"You are in the {ROOMS[i % 8]} room {i}. Go north or south.",
            max_tokens=12,
            seed=i,
            trajectory=f"t{i % 4}",
            temperature=(1.0, 0.7, 0.0)[i % 3],
            allowed=("go north", "go south", "go") if i % 2 else None,
            stop=("room",) if i % 5 == 0 else (),
        )
        for i in range(num)
    ]


def answers(policy, requests):
    policy.submit(requests)
    return gather(policy, len(requests))


def changed(model, factor):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def adapted(model, r=4, seed=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = apply_lora(copy.deepcopy(model), r=r, seed=seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def rows_of(completions):
    return tuple(
        ScoreRow(prompt_token_ids=c.prompt_token_ids, token_ids=c.token_ids) for c in completions
    )


def probe(model, tokenizer, rows, tolerance=1e-3):
    scores = TransformersEngine(model.eval(), tokenizer).score(rows)
    return Probe(rows=rows, logprobs=tuple(scores), tolerance=tolerance)


def test_an_actor_gives_what_the_engine_in_process_gives(tiny, policy):
    model, tokenizer, _ = tiny
    requests = mixed(64)
    got = answers(policy, requests)
    for expected in TransformersEngine(model, tokenizer).generate(requests):
        completion = got[expected.request_id]
        np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
        np.testing.assert_array_equal(completion.prompt_token_ids, expected.prompt_token_ids)
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
        assert (completion.text, completion.finish_reason) == (
            expected.text,
            expected.finish_reason,
        )
        if expected.allowed_token_ids is None:
            assert completion.allowed_token_ids is None
        else:
            for ours, theirs in zip(
                completion.allowed_token_ids, expected.allowed_token_ids, strict=True
            ):
                np.testing.assert_array_equal(ours, theirs)


def test_a_prompt_longer_than_the_context_fails_alone(policy):
    long = request("long", "You are in the red room. " * 200, max_tokens=4)
    got = answers(policy, [long, *mixed(3)])
    assert got["long"].finish_reason is FinishReason.ERROR
    assert "expected a prompt of 1 to 127 tokens" in got["long"].error
    assert all(got[f"r{i}"].error is None for i in range(3))


def test_scores_of_an_actor_are_those_of_the_model(tiny, policy):
    model, tokenizer, _ = tiny
    free = [r for r in mixed(20) if r.allowed is None and r.temperature == 1.0]
    completions = answers(policy, free).values()
    rows = rows_of(completions)
    (scores,) = policy.pool.score(rows).values()
    for completion, score, expected in zip(
        completions, scores, TransformersEngine(model, tokenizer).score(rows), strict=True
    ):
        np.testing.assert_allclose(score, expected, atol=1e-4)
        np.testing.assert_allclose(score, completion.logprobs, atol=1e-4)


def test_scores_are_those_of_plain_forwards(tiny):
    model, tokenizer, _ = tiny
    engine = TransformersEngine(model, tokenizer, max_batch_tokens=100)
    rows = rows_of(engine.generate(mixed(9)))
    for row, score in zip(rows, engine.score(rows), strict=True):
        ids = torch.tensor(np.concatenate([row.prompt_token_ids, row.token_ids]))[None].long()
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        first = len(row.prompt_token_ids) - 1
        expected = logprobs[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0]
        np.testing.assert_allclose(score, expected, atol=1e-4)


@pytest.mark.parametrize("route", ["shared_memory", "wire", "auto"])
def test_after_a_transfer_an_actor_computes_with_the_new_weights_and_not_the_old(
    tiny, policy, route
):
    model, tokenizer, _ = tiny
    rows = rows_of(TransformersEngine(model, tokenizer).generate(mixed(6)))
    version = policy.policy_version + 1
    new = changed(model, 1.2)
    policy.update_weights(new, version, route=route, probe=probe(new, tokenizer, rows))
    got = answers(policy, mixed(6))
    assert {c.policy_version for c in got.values()} == {version}
    for expected in TransformersEngine(new, tokenizer).generate(mixed(6)):
        np.testing.assert_array_equal(got[expected.request_id].token_ids, expected.token_ids)
    with pytest.raises(WeightsError, match="mean difference"):
        policy.update_weights(model, version + 1, route=route, probe=probe(new, tokenizer, rows))
    policy.update_weights(model, version + 2, route=route, probe=probe(model, tokenizer, rows))


@pytest.mark.parametrize("route", ["shared_memory", "wire"])
def test_an_adapter_is_put_on_replaced_and_taken_off(tiny, policy, route, tmp_path):
    model, tokenizer, _ = tiny
    rows = rows_of(TransformersEngine(model, tokenizer).generate(mixed(6)))
    version = policy.policy_version
    for seed, rank in ((1, 4), (2, 4), (3, 8)):
        version += 1
        tuned = adapted(model, r=rank, seed=seed)
        there = probe(tuned, tokenizer, rows)
        policy.update_adapter(tuned, version, route=route, probe=there)
    with pytest.raises(WeightsError, match="rank 8 at most, got rank 16"):
        policy.update_adapter(adapted(model, r=16), version + 1, route=route)
    tuned.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(WeightsError, match="which it does not have"):
        policy.update_weights(tmp_path, version + 1)
    (scores,) = policy.pool.score(rows).values()  # the adapter is still on
    np.testing.assert_allclose(np.concatenate(scores), np.concatenate(there.logprobs), atol=1e-3)
    new = changed(model, 1.1)
    policy.update_weights(new, version + 1, route=route, probe=probe(new, tokenizer, rows))
    policy.update_weights(model, version + 2, probe=probe(model, tokenizer, rows))


def test_an_adapter_that_lacks_weights_is_refused_and_the_earlier_one_stays_on(
    tiny, policy, tmp_path
):
    model, tokenizer, _ = tiny
    rows = rows_of(TransformersEngine(model, tokenizer).generate(mixed(6)))
    first, second = adapted(model, r=4, seed=1), adapted(model, r=4, seed=2)
    there = probe(first, tokenizer, rows)
    version = policy.policy_version + 1
    policy.update_adapter(first, version, probe=there)
    second.save_pretrained(tmp_path, save_embedding_layers=False)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(max(tensors))
    save_file(tensors, file)
    with pytest.raises(WeightsError, match="expected the weights of all that"):
        policy.update_adapter(tmp_path, version + 1)
    (scores,) = policy.pool.score(rows).values()
    np.testing.assert_allclose(np.concatenate(scores), np.concatenate(there.logprobs), atol=1e-3)
    policy.update_weights(model, version + 1, probe=probe(model, tokenizer, rows))


def test_an_adapter_of_another_strength_is_another_adapter(tiny, policy, tmp_path):
    model, tokenizer, _ = tiny
    rows = rows_of(TransformersEngine(model, tokenizer).generate(mixed(6)))
    tuned = adapted(model, r=4, seed=1)
    version = policy.policy_version + 1
    policy.update_adapter(tuned, version, probe=probe(tuned, tokenizer, rows))
    for module in tuned.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = dict.fromkeys(module.scaling, module.scaling["default"] * 2)
    tuned.peft_config["default"].lora_alpha *= 2
    policy.update_adapter(tuned, version + 1, probe=probe(tuned, tokenizer, rows))
    policy.update_weights(model, version + 2, probe=probe(model, tokenizer, rows))


def test_weights_of_another_shape_are_refused_and_the_run_goes_on(tiny, policy):
    model, tokenizer, _ = tiny
    other, _ = build_embedded(["a b c"], hidden_size=64)
    rows = rows_of(TransformersEngine(model, tokenizer).generate(mixed(4)))
    with pytest.raises(WeightsError, match=r"expected shape \(\d+, 128\) for .*, got \(\d+, 64\)"):
        policy.update_weights(other, 99)
    assert policy.policy_version != 99
    (scores,) = policy.pool.score(rows).values()
    for score, expected in zip(
        scores, TransformersEngine(model, tokenizer).score(rows), strict=True
    ):
        np.testing.assert_allclose(score, expected, atol=1e-4)


def test_a_rollout_through_an_actor_is_the_rollout_of_the_engine_in_process(tmp_path):
    corpus = corpus_of("longstep/KeyDoor-v0", num_episodes=4, max_steps=20)
    model, tokenizer = build_embedded(corpus.texts, actions=corpus.actions, max_length=512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
    tasks = [Task(env_id="longstep/KeyDoor-v0", seed=seed) for seed in range(4)]

    def columns(policy):
        with Rollout(
            "longstep/KeyDoor-v0", policy, group_size=4, max_steps=6, constrain=True, num_envs=8
        ) as rollout:
            batch = rollout.collect(tasks)
        assert batch.errors == ()
        return batch.to_numpy()

    expected = columns(EnginePolicy(TransformersEngine(model, tokenizer)))
    with open_policy(tmp_path, options={"dtype": "float32"}) as policy:
        got = columns(policy)
    assert expected.keys() == got.keys()
    for name, column in expected.items():
        if name == "logprobs":
            np.testing.assert_allclose(got[name], column, atol=1e-5)
        else:
            np.testing.assert_array_equal(got[name], column, err_msg=name)
