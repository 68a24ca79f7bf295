"""Requests for actors, and waiting for what becomes of them."""

import time

from longstep.types import GenerationRequest, Message, Prompt
from longstep_bindings.actors import ActorPool, ActorSpec

PLAIN = "plain_engine:PlainEngine"


def request(name, text, *, trajectory="", images=(), **settings):
    prompt = Prompt(messages=(Message(role="user", content=text),), images=tuple(images))
    return GenerationRequest(request_id=name, prompt=prompt, trajectory_id=trajectory, **settings)


def requests(text, num, prefix="r"):
    return [request(f"{prefix}{i}", text, trajectory=f"{prefix}{i}") for i in range(num)]


def gather(policy, num, timeout_s=60.0):
    """`num` completions by id."""
    got, end_at = {}, time.monotonic() + timeout_s
    while len(got) < num:
        assert time.monotonic() < end_at, f"got {len(got)} of {num}"
        for completion in policy.poll(1.0):
            assert completion.request_id not in got
            got[completion.request_id] = completion
    return got


def plain_pool(num_actors=1, model="any", options=None, **settings):
    return ActorPool(
        ActorSpec(model=model, engine=PLAIN, options=options or {}), num_actors, **settings
    )


def parts(completion):
    """Words, pid and peak of a plain engine's completion."""
    words, pid, peak = completion.text.rsplit("|", 2)
    return words, int(pid), int(peak)
