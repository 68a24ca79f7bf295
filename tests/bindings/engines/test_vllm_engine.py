"""vLLM as an engine, against the transformers engine with the same weights. One start of vLLM for the whole file."""

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.bindings.engines.vllm_rig import (
    CHOICES,
    MAX_LENGTH,
    Answers,
    ask,
    request,
    rows_of,
    save,
    tiny_model,
    vllm_marks,
    worst,
)

from longstep.errors import DataError, PolicyError, WeightsError
from longstep.types import FinishReason, Message, Prompt
from longstep_bindings.engines.served import ScoreRow
from longstep_bindings.engines.transformers_engine import TransformersEngine

pytestmark = vllm_marks
NOISE = 1e-3
"""Two ways to multiply float32 matrices, and weights made four times as large."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Model, tokenizer, their folder."""
    pytest.importorskip("vllm")
    model, tokenizer = tiny_model()
    return model, tokenizer, save(tmp_path_factory.mktemp("tiny"), model, tokenizer)


@pytest.fixture(scope="module")
def reference(tiny):
    model, tokenizer, _ = tiny
    return TransformersEngine(model, tokenizer)


@pytest.fixture(scope="module")
def engine(tiny):
    from longstep_bindings.engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(tiny[2], num_threads=1, kv_cache_gib=0.25, max_num_seqs=64)
    yield engine
    engine.close()


def test_says_what_it_is(engine, tiny):
    description = engine.description
    assert (description.engine, description.model) == ("vllm", str(tiny[2]))
    assert (description.dtype, description.max_length) == ("float32", MAX_LENGTH)
    assert not description.takes_adapters
    assert engine.failure is None


def test_samples_what_transformers_samples_with_the_same_seeds(engine, reference):
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 2.5, "top_p": 0.8},
    ]
    requests = [
        request(f"r{i}", f"You see {i} doors.", seed=i * 7 + 1, max_tokens=12, **settings[i % 4])
        for i in range(32)
    ]
    ours, theirs = ask(engine, requests), reference.generate(requests)
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) >= 31  # a random number may fall between two cumulative sums
    for alike, one, other in zip(same, ours, theirs, strict=True):
        np.testing.assert_array_equal(one.prompt_token_ids, other.prompt_token_ids)
        if alike:
            assert np.abs(one.logprobs - other.logprobs).max() < NOISE
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert one.allowed_token_ids is None


def test_choices_are_masked_and_renormalised_exactly(engine, reference):
    requests = [
        request(f"r{i}", f"You see {i} doors.", seed=i, allowed=CHOICES, temperature=1 + i % 2)
        for i in range(32)
    ]
    ours, theirs = ask(engine, requests), reference.generate(requests)
    assert len({completion.text for completion in ours}) > 3
    for one, other in zip(ours, theirs, strict=True):
        assert (one.text, one.finish_reason) == (other.text, FinishReason.STOP)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        assert np.abs(one.logprobs - other.logprobs).max() < NOISE
        assert one.allowed_token_ids is not None
        assert len(one.allowed_token_ids) == len(one.token_ids)
        for allowed, expected in zip(one.allowed_token_ids, other.allowed_token_ids, strict=True):
            np.testing.assert_array_equal(allowed, expected)
        forced = np.array([len(allowed) == 1 for allowed in one.allowed_token_ids])
        assert (one.logprobs[forced] == 0).all()
        assert (one.logprobs[~forced] < 0).all()


def test_choices_come_with_the_probability_that_they_are_chosen_with(engine):
    allowed = ("go north", "go south")
    completions = ask(
        engine, [request(f"r{i}", seed=i, allowed=allowed, max_tokens=8) for i in range(400)]
    )
    logprobs = {completion.text: float(completion.logprobs.sum()) for completion in completions}
    assert sum(np.exp(list(logprobs.values()))) == pytest.approx(1, abs=1e-5)
    share = sum(completion.text == "go north" for completion in completions) / len(completions)
    assert share == pytest.approx(np.exp(logprobs["go north"]), abs=0.1)


def test_one_choice_needs_no_computation(engine):
    before = engine.stats().cached_prompt_tokens
    (completion,) = ask(engine, [request("r", allowed=("go north now",))])
    assert completion.text == "go north now"
    assert (completion.logprobs == 0).all()
    assert engine.stats().cached_prompt_tokens == before


def test_a_seed_gives_the_same_tokens_whatever_else_is_computed(engine):
    alone = ask(engine, [request("r", seed=5, max_tokens=10)])[0]
    crowd = ask(engine, [request(f"r{i}", seed=i, max_tokens=10) for i in range(48)])
    np.testing.assert_array_equal(crowd[5].token_ids, alone.token_ids)
    assert np.abs(crowd[5].logprobs - alone.logprobs).max() < NOISE
    assert len({tuple(completion.token_ids) for completion in crowd}) > 40


def test_stop_strings_end_the_text_and_keep_the_tokens(engine, reference):
    free = ask(engine, [request("r", seed=3, max_tokens=24)])[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 2]
    requests = [request("r", seed=3, max_tokens=24, stop=(stop, "never"))]
    ours, theirs = ask(engine, requests)[0], reference.generate(requests)[0]
    assert ours.text == theirs.text == free.text[: free.text.find(stop)]
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    assert ours.finish_reason is FinishReason.STOP
    assert len(ours.token_ids) < len(free.token_ids)
    assert len(ours.logprobs) == len(ours.token_ids)


def test_an_end_of_turn_ends_a_completion_and_is_part_of_it(engine, tiny):
    completions = ask(
        engine, [request(f"r{i}", seed=i, max_tokens=400, temperature=3.0) for i in range(16)]
    )
    end_id = tiny[1].eos_token_id
    assert any(c.finish_reason is FinishReason.STOP for c in completions)
    for completion in completions:
        stopped = completion.finish_reason is FinishReason.STOP
        assert (completion.token_ids == end_id).sum() == stopped
        assert stopped == (completion.token_ids[-1] == end_id)


def test_scores_are_those_of_transformers_up_to_a_full_context(engine, reference):
    completions = ask(engine, [request(f"r{i}", seed=i, max_tokens=5 + i) for i in range(6)])
    rows = rows_of(completions)
    whole = np.resize(rows[0].prompt_token_ids, MAX_LENGTH)
    rows.append(ScoreRow(prompt_token_ids=whole[:300], token_ids=whole[300:]))
    rows.append(ScoreRow(prompt_token_ids=whole[:3], token_ids=whole[3:4]))
    scores = engine.score(rows)
    assert [len(score) for score in scores] == [len(row.token_ids) for row in rows]
    assert worst(scores, reference.score(rows)) < NOISE
    assert worst(scores[:6], [completion.logprobs for completion in completions]) < NOISE
    too_long = ScoreRow(prompt_token_ids=whole, token_ids=whole[:1])
    with pytest.raises(DataError, match="together at most 512 tokens"):
        engine.score([too_long])


def test_beginnings_that_come_again_are_found_in_the_cache(engine):
    text = "You are in the red room. " * 20
    before = engine.stats().cached_prompt_tokens
    for turn in range(2):
        ask(engine, [request(f"r{turn}", text, max_tokens=2)])
    assert engine.stats().cached_prompt_tokens - before > 64


def test_sixty_four_at_once_are_each_answered_once_and_counted(engine):
    before = engine.stats()
    requests = [
        request(f"r{i}", f"Room {i}", seed=i, allowed=CHOICES if i % 2 else None, max_tokens=16)
        for i in range(64)
    ]
    completions = ask(engine, requests)
    after = engine.stats()
    assert after.num_completions - before.num_completions == 64
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert after.generated_tokens - before.generated_tokens == tokens
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.busy_s > before.busy_s


@pytest.mark.parametrize(
    "bad",
    [
        {"text": "go north " * MAX_LENGTH},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"allowed": ()},
        {"allowed": ("go north now and then",), "max_tokens": 2},
    ],
    ids=str,
)
def test_a_bad_request_is_answered_as_transformers_answers_it(engine, reference, bad):
    requests = [request("bad", **bad), request("good", max_tokens=2)]
    ours, good = ask(engine, requests)
    theirs, _ = reference.generate(requests)
    assert ours.finish_reason is FinishReason.ERROR
    assert ours.error == theirs.error
    assert good.error is None


def test_images_are_refused(engine):
    prompt = Prompt(
        messages=(Message(role="user", content="<image>"),),
        images=(np.zeros((2, 2, 3), np.uint8),),
    )
    answers = Answers()
    engine.start(replace(request("r"), prompt=prompt), answers)
    assert "expected a prompt without images" in answers.wait(["r"])[0].error


def test_cancelled_requests_are_answered_so_and_leave_the_others_alone(engine):
    answers = Answers()
    long = {"max_tokens": 480, "allowed": None, "stop": ("never",)}
    for i in range(4):
        engine.start(request(f"r{i}", seed=i, **long), answers)
    engine.start(request("short", max_tokens=2), answers)
    engine.cancel(["r1", "r2", "unknown"])
    for completion in answers.wait(["r1", "r2"]):
        assert completion.finish_reason is FinishReason.CANCELLED
    assert answers.wait(["short"])[0].error is None
    engine.cancel(["r0", "r3"])
    answers.wait(["r0", "r3"])
    assert engine.stats().num_running == 0


def test_new_weights_serve_and_nothing_of_the_old_ones_does(engine, tiny, reference, tmp_path):
    other, _ = tiny_model(seed=1)
    rows = rows_of(ask(engine, [request(f"r{i}", seed=i, max_tokens=8) for i in range(4)]))
    old, new = reference.score(rows), TransformersEngine(other, tiny[1]).score(rows)
    assert worst(engine.score(rows), old) < NOISE
    first = engine.policy_version + 1
    for version, model, expected in ((first, other, new), (first + 1, tiny[0], old)):
        engine.load_weights(save(tmp_path / str(version), model), version=version)
        assert worst(engine.score(rows), expected) < NOISE
        completions = ask(engine, [request(f"r{i}", seed=i, max_tokens=8) for i in range(4)])
        assert {completion.policy_version for completion in completions} == {version}
    assert worst(old, new) > 0.5


def test_requests_on_the_way_end_under_the_weights_they_began_with(engine, tiny, tmp_path):
    other, tokenizer = tiny_model(seed=2)
    file = save(tmp_path, other) / "model.safetensors"
    answers, before, after = Answers(), engine.policy_version, engine.policy_version + 5
    for i in range(16):
        engine.start(request(f"old{i}", seed=i, max_tokens=40), answers)
    loading = threading.Thread(target=engine.load_weights, args=(file,), kwargs={"version": after})
    loading.start()
    late = []
    while loading.is_alive() or not late or late[-1] != "late-last":
        late.append(f"late{len(late)}" if loading.is_alive() else "late-last")
        engine.start(request(late[-1], seed=len(late), max_tokens=4), answers)
        time.sleep(0.005)
    completions = answers.wait([*(f"old{i}" for i in range(16)), *late])
    loading.join()
    assert engine.policy_version == after
    engines = {
        version: TransformersEngine(model, tokenizer)
        for version, model in ((before, tiny[0]), (after, other))
    }
    by_version = {c.policy_version for c in completions}
    assert by_version <= {before, after}
    assert completions[-1].policy_version == after
    for version in by_version:
        made = [c for c in completions if c.policy_version == version]
        assert worst(engines[version].score(rows_of(made)), [c.logprobs for c in made]) < NOISE
    engine.load_weights(tiny[2], version=after + 1)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    engine, tiny, reference, tmp_path
):
    wide, _ = tiny_model(hidden_size=256)
    version = engine.policy_version
    with pytest.raises(WeightsError, match="they are weights of another model"):
        engine.load_weights(save(tmp_path / "wide", wide), version=99)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((tiny[2] / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(WeightsError, match="expected a whole safetensors file"):
        engine.load_weights(cut, version=99)
    with pytest.raises(WeightsError, match="without one"):
        engine.load_weights(tmp_path / "nothing", version=99)
    with pytest.raises(WeightsError, match="open it with `max_adapter_rank`"):
        engine.load_adapter(tmp_path, version=99)
    assert engine.policy_version == version
    rows = rows_of(ask(engine, [request("r", max_tokens=8)]))
    assert worst(engine.score(rows), reference.score(rows)) < NOISE


def test_the_death_of_its_process_answers_everything_and_is_told(engine):
    """Last in this file: nothing works afterwards."""
    answers = Answers()
    for i in range(8):
        engine.start(request(f"r{i}", seed=i, max_tokens=480, stop=("never",)), answers)
    os.kill(_engine_process(), signal.SIGKILL)
    for completion in answers.wait([f"r{i}" for i in range(8)]):
        assert completion.finish_reason is FinishReason.ERROR
        assert "engine process died" in completion.error
    assert "engine process died" in engine.failure
    assert "engine process died" in ask(engine, [request("later")])[0].error
    with pytest.raises(PolicyError, match="engine process died"):
        engine.score([ScoreRow(prompt_token_ids=np.ones(1, int), token_ids=np.ones(1, int))])
    engine.close()
    engine.close()
    assert ask(engine, [request("closed")])[0].finish_reason is FinishReason.CANCELLED


def _engine_process():
    import psutil

    children = psutil.Process().children(recursive=True)
    return next(child.pid for child in children if "EngineCore" in child.name())
