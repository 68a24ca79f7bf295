"""Adapters at a vLLM engine, and SmolLM2 in its own number format, against transformers and peft."""

import numpy as np
import pytest
import torch
from tests.bindings.engines.vllm_rig import (
    CHOICES,
    ask,
    request,
    rows_of,
    save,
    tiny_model,
    vllm_marks,
    worst,
)
from tests.bindings.vllm_python import smollm2

from longstep.errors import WeightsError
from longstep_bindings.engines.transformers_engine import TransformersEngine

pytestmark = vllm_marks
NOISE = 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("vllm")
    model, tokenizer = tiny_model()
    return model, tokenizer, save(tmp_path_factory.mktemp("tiny"), model, tokenizer)


@pytest.fixture(scope="module")
def engine(tiny):
    from longstep_bindings.engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(tiny[2], num_threads=1, kv_cache_gib=0.25, max_adapter_rank=4)
    yield engine
    engine.close()


def adapter(model, folder, *, seed, rank=4, targets=("q_proj", "v_proj", "down_proj")):
    """The model with a random adapter, which is saved in `folder`."""
    import copy

    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(folder)
    return adapted.eval()


def test_adapters_take_each_others_place_and_weights_take_them_off(engine, tiny, tmp_path):
    model, tokenizer, folder = tiny
    assert engine.description.takes_adapters
    rows = rows_of(ask(engine, [request(f"r{i}", seed=i, max_tokens=8) for i in range(4)]))
    plain = TransformersEngine(model, tokenizer).score(rows)
    assert worst(engine.score(rows), plain) < NOISE
    for version in (1, 2, 3):
        # The same folder, written anew: what serves is what was in it when it was loaded.
        adapted = adapter(model, tmp_path / "adapter", seed=version)
        engine.load_adapter(tmp_path / "adapter", version=version)
        reference = TransformersEngine(adapted, tokenizer)
        expected = reference.score(rows)
        assert worst(expected, plain) > 0.5
        assert worst(engine.score(rows), expected) < NOISE
        requests = [request(f"r{i}", seed=i, allowed=CHOICES) for i in range(8)]
        ours, theirs = ask(engine, requests), reference.generate(requests)
        assert {completion.policy_version for completion in ours} == {version}
        assert [c.text for c in ours] == [c.text for c in theirs]
        assert worst([c.logprobs for c in ours], [c.logprobs for c in theirs]) < NOISE
    engine.load_weights(folder, version=4)
    assert worst(engine.score(rows), plain) < NOISE


def test_new_weights_reach_a_model_that_takes_adapters(engine, tiny, tmp_path):
    other, tokenizer = tiny_model(seed=1)
    rows = rows_of(ask(engine, [request("r", max_tokens=8)]))
    engine.load_weights(save(tmp_path, other), version=5)
    assert worst(engine.score(rows), TransformersEngine(other, tokenizer).score(rows)) < NOISE
    engine.load_weights(tiny[2], version=6)


def test_an_adapter_that_does_not_fit_is_refused_and_the_one_before_serves_on(
    engine, tiny, tmp_path
):
    model, tokenizer, _ = tiny
    fitting = adapter(model, tmp_path / "fitting", seed=7)
    engine.load_adapter(tmp_path / "fitting", version=7)
    adapter(model, tmp_path / "large", seed=8, rank=16)
    with pytest.raises(WeightsError, match="expected an adapter of rank 4 at most, got rank 16"):
        engine.load_adapter(tmp_path / "large", version=8)
    adapter(tiny_model(hidden_size=256)[0], tmp_path / "other", seed=8)
    with pytest.raises(WeightsError, match="it is an adapter of another model"):
        engine.load_adapter(tmp_path / "other", version=8)
    with pytest.raises(WeightsError, match=r"adapter_config\.json"):
        engine.load_adapter(tmp_path, version=8)
    adapter(model, tmp_path / "head", seed=8, targets=("lm_head", "q_proj"))
    with pytest.raises(WeightsError):
        engine.load_adapter(tmp_path / "head", version=8)
    assert engine.policy_version == 7
    rows = rows_of(ask(engine, [request("r", max_tokens=8)]))
    assert worst(engine.score(rows), TransformersEngine(fitting, tokenizer).score(rows)) < NOISE


def test_smollm2_has_the_log_probabilities_of_transformers():
    pytest.importorskip("vllm")
    import transformers

    from longstep_bindings.engines.vllm_engine import VLLMEngine

    folder = smollm2()
    engine = VLLMEngine(folder, num_threads=1, kv_cache_gib=0.5, max_length=512)
    try:
        requests = [
            request(f"r{i}", f"Name {i + 2} colours.", seed=i, max_tokens=12, temperature=0.7)
            for i in range(4)
        ]
        requests += [
            request(f"c{i}", "Where do you go?", seed=i, allowed=("go north", "go south", "wait"))
            for i in range(4)
        ]
        ours = ask(engine, requests)
        scores = engine.score(rows_of(ours))
        # bfloat16 keeps 8 bits of each product: seen are differences of 0.03 to 0.15.
        noise = 0.3 if engine.description.dtype == "bfloat16" else NOISE
    finally:
        engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = TransformersEngine(model, transformers.AutoTokenizer.from_pretrained(folder))
    assert worst(scores, reference.score(rows_of(ours))) < noise
    theirs = reference.generate(requests)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.prompt_token_ids, other.prompt_token_ids)
        if one.token_ids.tolist() == other.token_ids.tolist():
            assert np.abs(one.logprobs - other.logprobs).max() < noise
    same = sum(
        a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(ours, theirs, strict=True)
    )
    assert same >= (4 if noise > NOISE else 7)
