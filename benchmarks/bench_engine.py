"""Batched constrained decoding with the embedded model, in milliseconds per `generate`.

The baseline of the same run is the obvious way: transformers' own forward over the left-padded batch, tokenisation
included, with every prompt computed in full. Run with `pytest benchmarks/bench_engine.py`.
"""

import random

import pytest
import torch

from longstep.types import GenerationRequest, Message, Prompt
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_trainers.model import build_embedded

BATCH_SIZE = 128
WORDS = (
    "room", "door", "key", "north", "south", "east", "west", "you", "are", "in", "the", "red", "blue",
    "green", "closed", "open",
)  # fmt: skip
ACTIONS = ("go north", "go south", "go east", "go west", "take key", "open door")


def observation(player: random.Random) -> str:
    words = " ".join(player.choice(WORDS) for _ in range(18))
    return f"Find the key, open the door. You see {words}. Actions: {', '.join(ACTIONS)}."


class Batches:
    """Endless batches of prompts of about 40 tokens, never the same twice."""

    def __init__(self, num_distinct: int) -> None:
        self.player = random.Random(0)
        self.num_distinct = num_distinct

    def requests(self) -> list[GenerationRequest]:
        texts = [observation(self.player) for _ in range(self.num_distinct)]
        return [
            GenerationRequest(
                request_id=str(i),
                prompt=Prompt(
                    messages=(Message(role="user", content=texts[i % self.num_distinct]),)
                ),
                allowed=ACTIONS,
                max_tokens=8,
                seed=i,
            )
            for i in range(BATCH_SIZE)
        ]


@pytest.fixture(scope="module")
def parts():
    player = random.Random(1)
    return build_embedded([observation(player) for _ in range(100)], actions=ACTIONS)


@pytest.mark.parametrize("num_distinct", [128, 32])
def test_engine(benchmark, parts, num_distinct):
    engine, batches = TransformersEngine(*parts), Batches(num_distinct)
    benchmark.pedantic(
        engine.generate, setup=lambda: ((batches.requests(),), {}), rounds=20, warmup_rounds=2
    )


@pytest.mark.parametrize("num_distinct", [128, 32])
def test_baseline_of_plain_transformers(benchmark, parts, num_distinct):
    model, tokenizer = parts
    batches = Batches(num_distinct)
    allowed = torch.tensor([tokenizer(action)["input_ids"][0] for action in ACTIONS])

    @torch.inference_mode()
    def generate(requests):
        chats = [[dict(message) for message in request.prompt.messages] for request in requests]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        logits = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            position_ids=positions,
            use_cache=False,
        ).logits[:, -1, allowed]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.exp().multinomial(1)
        return allowed[chosen], logprobs.gather(1, chosen)

    benchmark.pedantic(
        generate, setup=lambda: ((batches.requests(),), {}), rounds=20, warmup_rounds=2
    )
