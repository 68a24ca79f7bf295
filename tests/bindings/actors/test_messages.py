"""What travels between pool and actor comes back as it went, and damage is a ProtocolError."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from longstep.errors import ProtocolError
from longstep.types import Completion, FinishReason, GenerationRequest, Message, Prompt
from longstep_bindings.actors.images import ImageShelf, digest_of
from longstep_bindings.actors.messages import (
    pack_completions,
    pack_requests,
    pack_rows,
    read_completions,
    read_not_taken,
    read_requests,
    read_rows,
    read_stats,
    read_taken,
)
from longstep_bindings.engines.served import EngineStats, ScoreRow
from longstep_bindings.wire import decode, encode

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IMAGES = arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 4), st.just(3)))
IDS = arrays(np.int32, st.integers(0, 6), elements=st.integers(0, 1 << 30))


@st.composite
def requests(draw):
    roles = st.sampled_from(["system", "user", "assistant"])
    messages = st.builds(Message, role=roles, content=TEXTS)
    return GenerationRequest(
        request_id=draw(TEXTS),
        prompt=Prompt(
            messages=tuple(draw(st.lists(messages, max_size=3))),
            images=tuple(draw(st.lists(IMAGES, max_size=2))),
        ),
        max_tokens=draw(st.integers(1, 1 << 20)),
        temperature=draw(st.floats(0, 10)),
        top_p=draw(st.floats(0.1, 1.0)),
        stop=tuple(draw(st.lists(TEXTS, max_size=2))),
        allowed=draw(st.none() | st.lists(TEXTS, max_size=3).map(tuple)),
        seed=draw(st.integers(0, (1 << 63) - 1)),
        trajectory_id=draw(TEXTS),
    )


@st.composite
def completions(draw):
    token_ids = draw(IDS)
    num = len(token_ids)
    options = st.none() | st.lists(IDS, min_size=num, max_size=num).map(tuple)
    return Completion(
        request_id=draw(TEXTS),
        prompt_token_ids=draw(IDS),
        token_ids=token_ids,
        logprobs=draw(arrays(np.float32, num, elements=st.floats(-100, 0, width=32))),
        text=draw(TEXTS),
        finish_reason=draw(st.sampled_from(list(FinishReason))),
        policy_version=draw(st.integers(0, 1 << 40)),
        allowed_token_ids=draw(options),
        error=draw(st.none() | TEXTS),
    )


def same(one, two):
    for field in fields(Completion):
        a, b = getattr(one, field.name), getattr(two, field.name)
        if field.name == "allowed_token_ids" and a is not None:
            assert len(a) == len(b)
            assert all(map(np.array_equal, a, b))
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b, field.name
    return True


@settings(deadline=None)
@given(st.lists(requests(), max_size=4))
def test_requests_come_back_as_they_went(batch):
    shelf = {digest_of(image): image for r in batch for image in r.prompt.images}
    named = [(r.request_id, r, [digest_of(i) for i in r.prompt.images]) for r in batch]
    read, missing = read_requests(decode(encode(pack_requests(named, shelf))), shelf.get)
    assert read == batch
    assert missing == []
    for ours, theirs in zip(read, batch, strict=True):
        assert all(map(np.array_equal, ours.prompt.images, theirs.prompt.images))
    read, missing = read_requests(decode(encode(pack_requests(named, {}))), {}.get)
    assert missing == [r.request_id for r in batch if r.prompt.images]
    assert read == [r for r in batch if not r.prompt.images]


@settings(deadline=None)
@given(st.lists(completions(), max_size=4))
def test_completions_come_back_as_they_went(batch):
    read, stats = read_taken(decode(encode([pack_completions(batch), {"num_running": 3}])))
    assert stats == EngineStats(num_running=3)
    assert len(read) == len(batch)
    assert all(map(same, read, batch))


@settings(deadline=None)
@given(st.lists(st.tuples(IDS, IDS, st.lists(IMAGES, max_size=2)), max_size=3))
def test_rows_to_score_come_back_as_they_went(parts):
    rows = [
        ScoreRow(prompt_token_ids=a, token_ids=b, images=tuple(images)) for a, b, images in parts
    ]
    for ours, theirs in zip(read_rows(decode(encode(pack_rows(rows)))), rows, strict=True):
        np.testing.assert_array_equal(ours.prompt_token_ids, theirs.prompt_token_ids)
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        assert all(map(np.array_equal, ours.images, theirs.images))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["requests", "allowed", "ids", "sizes", "token_ids", "logprobs", "options"])


@pytest.mark.parametrize("read", [read_completions, read_taken, read_rows, read_not_taken])
@given(value=VALUES | st.dictionaries(KEYS, VALUES))
@example(value=[[2147483648.0, None, None]])
@example(value={"ids": [""], "versions": [float("inf")]})
@example(value="")
def test_whatever_else_comes_is_a_protocol_error(read, value):
    try:
        read(value)
    except ProtocolError:
        return
    assert value in ([], {})


@given(st.data())
def test_a_damaged_batch_of_requests_is_a_protocol_error(data):
    good = pack_requests([("a", data.draw(requests()), [])], {})
    row = good["requests"][0]
    row[data.draw(st.integers(0, len(row) - 1))] = data.draw(VALUES | st.just({}))
    try:
        read_requests(good, {}.get)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "name", ["ids", "texts", "reasons", "versions", "sizes", "token_ids", "option_sizes"]
)
def test_columns_that_do_not_fit_each_other_are_a_protocol_error(name):
    completion = Completion(
        request_id="a",
        prompt_token_ids=np.arange(2, dtype=np.int32),
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, np.float32),
        text="x",
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    columns = pack_completions([completion, completion])
    columns[name] = columns[name][:1]
    with pytest.raises(ProtocolError, match="expected completions"):
        read_completions(columns)


@given(VALUES)
def test_counts_of_another_version_are_passed_over(value):
    assert isinstance(read_stats(value), EngineStats)
    assert read_stats({"num_running": 2, "later": value}).num_running == 2


def test_a_digest_tells_shape_and_pixels():
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    others = [image.reshape(4, 2, 3), image + 1, image[:, ::-1]]
    assert len({digest_of(image), *map(digest_of, others)}) == 4
    assert digest_of(image[:, ::-1]) == digest_of(image[:, ::-1].copy())


def test_a_shelf_keeps_the_images_met_latest():
    images = [np.full((2, 2, 3), value, np.uint8) for value in range(4)]
    shelf = ImageShelf(3 * images[0].nbytes)
    for image in images[:3]:
        shelf.put(digest_of(image), image)
    assert shelf.get(digest_of(images[0])) is images[0]
    shelf.put(digest_of(images[3]), images[3])
    assert shelf.get(digest_of(images[1])) is None
    assert len(shelf) == 3
    shelf.put(b"large", np.zeros((9, 9, 3), np.uint8))
    assert len(shelf) == 3
