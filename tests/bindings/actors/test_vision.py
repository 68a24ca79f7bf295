"""A vision-language model behind an actor: images of an environment, over the wire, into the engine."""

from __future__ import annotations

import numpy as np
import pytest
from tests.bindings.engines.tiny_vision import (
    tiny_image_processor,
    tiny_vision_model,
    tiny_vision_tokenizer,
)

from longstep import EnginePolicy, FrameMemory, LLMAgentEnv, PromptTemplate, Rollout, Task, make
from longstep_bindings.actors import open_policy
from longstep_bindings.engines.image_prompts import PlainProcessor
from longstep_bindings.engines.transformers_engine import TransformersEngine

SOKOBAN = "longstep/Sokoban-v0"


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """The model, its processor, and the folder they are saved in."""
    folder = tmp_path_factory.mktemp("vision")
    model = tiny_vision_model()
    processor = PlainProcessor(tiny_vision_tokenizer(), tiny_image_processor())
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    return model, processor, folder


def _play(policy):
    def make_env():
        return LLMAgentEnv(
            make(SOKOBAN, observation="rgb").env,
            memory=FrameMemory(1),
            prompt=PromptTemplate(None, "{memory} {current_observation} go"),
            max_steps=3,
        )

    with Rollout(make_env, policy, group_size=2, constrain=True, num_envs=4) as rollout:
        return rollout.collect([Task(env_id=SOKOBAN, seed=s) for s in range(2)], iteration=0)


def test_an_agent_with_eyes_plays_through_an_actor_as_it_does_in_process(vision):
    model, processor, folder = vision
    here = _play(EnginePolicy(TransformersEngine(model, processor.tokenizer, processor=processor)))

    with open_policy(folder, engine="transformers", num_actors=1) as policy:
        there = _play(policy)

    assert not there.errors
    for one, other in zip(here.rows, there.rows, strict=True):
        assert one.state_key == other.state_key
        np.testing.assert_array_equal(
            one.completion.prompt_token_ids, other.completion.prompt_token_ids
        )
        np.testing.assert_array_equal(one.completion.token_ids, other.completion.token_ids)
        np.testing.assert_allclose(one.completion.logprobs, other.completion.logprobs, atol=1e-4)
