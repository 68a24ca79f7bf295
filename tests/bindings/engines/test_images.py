"""Prompts with images through the transformers engine, with a real vision-language architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.bindings.engines.tiny_vision import (
    tiny_image_processor,
    tiny_vision_model,
    tiny_vision_tokenizer,
)

from longstep.env import LLMAgentEnv
from longstep.memory import FrameMemory
from longstep.policy import EnginePolicy
from longstep.prompt import PromptTemplate
from longstep.registration import make
from longstep.rollout import Rollout
from longstep.types import FinishReason, GenerationRequest, Message, Prompt, Task
from longstep_bindings.engines.image_prompts import ImagePrompts, PlainProcessor, load_processor
from longstep_bindings.engines.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def processor():
    return PlainProcessor(tiny_vision_tokenizer(), tiny_image_processor())


@pytest.fixture(scope="module")
def engine(processor):
    return TransformersEngine(tiny_vision_model(), processor.tokenizer, processor=processor)


def _image(seed, height=56, width=84):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _request(name, *images, text="go", **settings):
    content = "<image>" * len(images) + text
    prompt = Prompt(messages=(Message(role="user", content=content),), images=images)
    return GenerationRequest(
        request_id=name, prompt=prompt, **{"max_tokens": 4, "seed": 3, **settings}
    )


def _slow_logprobs(engine, processor, request, completion):
    """Log-probabilities of a completion from one plain forward pass over prompt and completion."""
    inputs = ImagePrompts(processor).encode(request.prompt)
    ids = torch.tensor([[*inputs.prompt_ids, *completion.token_ids]], dtype=torch.long)
    types = torch.zeros_like(ids)
    types[0, : len(inputs.prompt_ids)] = inputs.by_token["mm_token_type_ids"][0]
    with torch.inference_mode():
        logits = engine.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=types,
            **inputs.by_image,
        ).logits[0]
    logits = logits[len(inputs.prompt_ids) - 1 : -1].float()
    if completion.allowed_token_ids is not None:
        mask = torch.full_like(logits, float("-inf"))
        for row, allowed in zip(mask, completion.allowed_token_ids, strict=True):
            row[torch.from_numpy(allowed).long()] = 0.0
        logits = logits + mask
    logprobs = logits.log_softmax(-1)
    return logprobs[range(len(completion.token_ids)), completion.token_ids.astype(int)].numpy()


def test_logprobs_are_those_of_a_plain_forward_pass(engine, processor):
    requests = [
        _request("one", _image(0)),
        _request("two", _image(1, 28, 56), _image(2, 112, 56), text="go left", seed=9),
        _request("none", text="up"),
        _request("choice", _image(3), allowed=("go left", "go right", "up")),
    ]

    completions = engine.generate(requests)

    for request, completion in zip(requests, completions, strict=True):
        assert completion.error is None
        assert len(completion.token_ids) > 0
        if request.prompt.images:
            expected = _slow_logprobs(engine, processor, request, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)
    assert completions[3].text in ("go left", "go right", "up")


def test_the_models_own_generation_defaults_change_nothing(processor):
    model = tiny_vision_model()
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_new_tokens = 1
    engine = TransformersEngine(model, processor.tokenizer, processor=processor)
    request = _request("one", _image(0), max_tokens=6)

    completion = engine.generate([request])[0]

    expected = _slow_logprobs(engine, processor, request, completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)
    assert model.generation_config.repetition_penalty == 5.0


def test_a_batch_gives_what_each_prompt_gives_alone(engine):
    requests = [_request(str(i), _image(i, 28 * (1 + i % 3)), seed=i) for i in range(6)]

    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]

    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)


def test_another_image_changes_what_is_likely(engine):
    first, second = engine.generate(
        [
            _request("a", _image(0), temperature=0.0, allowed=("up", "down")),
            _request("b", 255 - _image(0), temperature=0.0, allowed=("up", "down")),
        ]
    )

    assert first.logprobs[0] != second.logprobs[0]


def test_an_image_takes_as_many_ids_as_it_has_tokens(processor):
    inputs = ImagePrompts(processor).encode(_request("a", _image(0, 56, 84)).prompt)

    image_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (inputs.prompt_ids == image_id).sum() == (56 // 28) * (84 // 28)


def test_a_prompt_with_images_at_a_text_engine_is_an_error_of_that_request(processor):
    engine = TransformersEngine(tiny_vision_model(), processor.tokenizer)

    failed, fine = engine.generate([_request("a", _image(0)), _request("b")])

    assert failed.finish_reason is FinishReason.ERROR
    assert "processor" in (failed.error or "")
    assert fine.error is None


def test_the_processor_is_read_from_the_models_folder(tmp_path, processor):
    tiny_vision_model().save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    processor.image_processor.save_pretrained(tmp_path)

    loaded = ImagePrompts(load_processor(tmp_path, processor.tokenizer))

    prompt = _request("a", _image(0)).prompt
    expected = ImagePrompts(processor).encode(prompt)
    np.testing.assert_array_equal(loaded.encode(prompt).prompt_ids, expected.prompt_ids)


def test_an_agent_with_eyes_plays_sokoban(engine):
    def make_env():
        raw = make("longstep/Sokoban-v0", observation="rgb").env
        return LLMAgentEnv(
            raw,
            memory=FrameMemory(1),
            prompt=PromptTemplate(None, "{memory} {current_observation} go"),
            max_steps=3,
        )

    rollout = Rollout(make_env, EnginePolicy(engine), group_size=2, constrain=True, num_envs=4)
    with rollout:
        batch = rollout.collect([Task(env_id="longstep/Sokoban-v0", seed=s) for s in range(2)])

    assert not batch.errors
    assert len(batch.rows) == 12
    assert [len(row.prompt.images) for row in batch.trajectories[0].steps] == [1, 2, 2]
