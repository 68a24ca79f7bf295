"""A tiny model in a folder, requests for it, and waiting for answers."""

import threading
import warnings

import numpy as np
import pytest

from longstep.types import GenerationRequest, Message, Prompt
from longstep_bindings.engines.served import ScoreRow

# vLLM and what it imports warn of each other's deprecated names.
vllm_marks = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

ACTIONS = ("go north", "go south", "take the key", "open the door")
COLOURS = ("red", "blue", "green", "grey")
CHOICES = (
    "go",
    "go north",
    "take the red key",
    "take the blue key",
    "take a rest",
    "öffne die Tür",
)
MAX_LENGTH = 512


def tiny_model(seed=0, hidden_size=128):
    """The embedded model with distributions far from uniform, and its tokenizer."""
    import torch

    from longstep_trainers.embedded import build_embedded

    texts = [f"You are in the {c} room. You see a {c} key, a door. Go on?" for c in COLOURS]
    model, tokenizer = build_embedded(
        texts, actions=ACTIONS[:2], max_length=MAX_LENGTH, seed=seed, hidden_size=hidden_size
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model, tokenizer


def save(folder, model, tokenizer=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return folder


def request(name, text="You are in the red room.", **settings):
    prompt = Prompt(messages=(Message(role="user", content=text),))
    return GenerationRequest(request_id=name, prompt=prompt, **settings)


class Answers:
    """Completions by id, as they come; each request is answered once."""

    def __init__(self):
        self._changed = threading.Condition()
        self.found = {}

    def __call__(self, completion):
        with self._changed:
            assert completion.request_id not in self.found
            self.found[completion.request_id] = completion
            self._changed.notify_all()

    def wait(self, names, timeout_s=240.0):
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= self.found.keys(), timeout_s), (
                f"{len(self.found)} of {len(names)} answered"
            )
            return [self.found[name] for name in names]


def ask(engine, requests):
    """The completions of `requests`, in their order."""
    answers = Answers()
    for each in requests:
        engine.start(each, answers)
    return answers.wait([each.request_id for each in requests])


def rows_of(completions):
    return [
        ScoreRow(prompt_token_ids=c.prompt_token_ids, token_ids=c.token_ids) for c in completions
    ]


def worst(first, second):
    """The largest difference between two lists of arrays."""
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))
