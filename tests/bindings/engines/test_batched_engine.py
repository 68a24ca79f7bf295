"""The batched engine: requests at any time, cancelled ones, failures, weights between two batches."""

import threading
import time
import warnings

import numpy as np
import pytest
import torch

from longstep.errors import DataError, PolicyError, WeightsError
from longstep.types import FinishReason, GenerationRequest, Message, Prompt
from longstep_bindings.engines.batched import BatchedEngine
from longstep_bindings.engines.model_weights import checkpoint_tensors
from longstep_bindings.engines.opening import open_engine
from longstep_bindings.engines.served import ScoreRow, ServedEngine
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_bindings.engines.weight_files import write_weights
from longstep_trainers.embedded import build_embedded


@pytest.fixture(scope="module")
def parts():
    return build_embedded(["You see a red door and a blue key."], actions=("go", "take"))


@pytest.fixture
def engine(parts):
    model, tokenizer = build_embedded(
        ["You see a red door and a blue key."], actions=("go", "take"), max_length=256
    )
    engine = BatchedEngine(TransformersEngine(model, tokenizer), model_name="tiny")
    yield engine
    engine.close()


def request(name, text="You see a key.", **settings):
    prompt = Prompt(messages=(Message(role="user", content=text),))
    return GenerationRequest(request_id=name, prompt=prompt, **settings)


class Answers:
    """Collects completions; `wait` gives them by id."""

    def __init__(self):
        self.got = {}
        self.changed = threading.Condition()

    def __call__(self, completion):
        with self.changed:
            assert completion.request_id not in self.got
            self.got[completion.request_id] = completion
            self.changed.notify()

    def wait(self, num):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.got) >= num, 60.0)
            return dict(self.got)


def test_requests_that_come_one_by_one_are_all_answered(engine):
    answers = Answers()
    for i in range(50):
        engine.start(request(f"r{i}", max_tokens=3, seed=i), answers)
    got = answers.wait(50)
    assert set(got) == {f"r{i}" for i in range(50)}
    stats = engine.stats()
    assert (stats.num_completions, stats.num_waiting, stats.num_running) == (50, 0, 0)
    assert stats.generated_tokens == sum(len(c.token_ids) for c in got.values())
    assert stats.busy_s > 0


def test_a_request_gives_the_same_tokens_whatever_runs_beside_it(engine):
    answers = Answers()
    engine.start(request("alone", max_tokens=20, seed=7), answers)
    alone = answers.wait(1)["alone"]
    for i in range(20):
        engine.start(request(f"r{i}", "You see a red door.", max_tokens=5, seed=i), answers)
    engine.start(request("again", max_tokens=20, seed=7), answers)
    np.testing.assert_array_equal(answers.wait(22)["again"].token_ids, alone.token_ids)


def test_withdrawn_requests_are_answered_at_once_as_cancelled(engine):
    answers = Answers()
    for i in range(4):
        engine.start(request(f"r{i}", max_tokens=200), answers)
    engine.cancel(["r0", "r3", "nobody"])
    got = answers.wait(2)
    assert {got[name].finish_reason for name in ("r0", "r3")} == {FinishReason.CANCELLED}
    got = answers.wait(4)
    assert got["r1"].finish_reason is not FinishReason.CANCELLED


def test_a_request_that_makes_the_engine_raise_fails_alone(engine, monkeypatch):
    generate = engine._engine.generate

    def sometimes(requests):
        if any(r.request_id == "bad" for r in requests):
            raise RuntimeError("out of memory")
        return generate(requests)

    monkeypatch.setattr(engine._engine, "generate", sometimes)
    answers = Answers()
    for name in ("a", "bad", "b"):
        engine.start(request(name, max_tokens=2), answers)
    got = answers.wait(3)
    assert (got["bad"].finish_reason, got["bad"].error) == (
        FinishReason.ERROR,
        "RuntimeError: out of memory",
    )
    assert got["a"].error is got["b"].error is None


def test_weights_wait_for_the_running_batch_and_change_the_next(engine, parts, tmp_path):
    answers = Answers()
    tensors, _ = checkpoint_tensors(engine._engine.model)
    write_weights(tmp_path / "w.safetensors", tensors)
    for i in range(8):
        engine.start(request(f"old{i}", max_tokens=200, seed=i), answers)
    while not engine.stats().num_running:
        time.sleep(0.001)
    loading = threading.Thread(
        target=engine.load_weights, args=(tmp_path / "w.safetensors",), kwargs={"version": 5}
    )
    loading.start()
    for i in range(8):
        engine.start(request(f"new{i}", max_tokens=3, seed=i), answers)
    loading.join(60.0)
    got = answers.wait(16)
    assert {got[f"old{i}"].policy_version for i in range(8)} == {0}
    assert {got[f"new{i}"].policy_version for i in range(8)} == {5}


def test_closing_answers_what_is_open(engine):
    answers = Answers()
    for i in range(4):
        engine.start(request(f"r{i}", max_tokens=200), answers)
    engine.close()
    engine.close()
    engine.start(request("late"), answers)
    assert {c.finish_reason for c in answers.wait(5).values()} == {FinishReason.CANCELLED}


@pytest.mark.parametrize("num_tokens", [0, 300])
def test_rows_that_cannot_be_scored_are_refused(engine, num_tokens):
    row = ScoreRow(prompt_token_ids=np.ones(1, np.int32), token_ids=np.ones(num_tokens, np.int32))
    with pytest.raises(DataError, match=rf"got 1 and {num_tokens} at `rows\[0\]`"):
        engine.score([row])


def test_an_engine_opened_by_name_is_a_served_engine(parts, tmp_path):
    model, tokenizer = parts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
    engine: ServedEngine = open_engine("transformers", tmp_path, dtype="bfloat16", max_batch=2)
    try:
        description = engine.description
        assert (description.engine, description.model) == ("transformers", str(tmp_path))
        assert (description.dtype, description.takes_images) == ("bfloat16", False)
        assert engine.failure is None
        answers = Answers()
        for i in range(5):
            engine.start(request(f"r{i}", max_tokens=2), answers)
        assert len(answers.wait(5)) == 5
        assert all(not p.requires_grad for p in engine._engine.model.parameters())
        assert torch.is_grad_enabled()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("said", "is_for_good"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: out of memory", False),
        ("shapes cannot be multiplied", False),
    ],
)
def test_an_error_that_takes_the_gpu_away_is_the_engines_failure(engine, said, is_for_good):
    def generate(requests):
        raise RuntimeError(said)

    engine._engine.generate = generate
    answers = Answers()
    for name in ("a", "b"):
        engine.start(request(name), answers)
    got = answers.wait(2)
    assert {c.finish_reason for c in got.values()} == {FinishReason.ERROR}
    assert all(said in c.error for c in got.values())
    assert (engine.failure is not None) == is_for_good


def test_an_engine_with_half_of_some_new_weights_answers_nothing_any_more(
    engine, tmp_path, monkeypatch
):
    tensors, _ = checkpoint_tensors(engine._engine.model)
    write_weights(tmp_path / "w.safetensors", tensors)

    def broken(path):
        yield from list(tensors.items())[:2]
        raise OSError("the disk is gone")

    monkeypatch.setattr("longstep_bindings.engines.model_weights.tensors_in", broken)
    with pytest.raises(PolicyError, match="the disk is gone"):
        engine.load_weights(tmp_path / "w.safetensors", version=1)
    assert "the disk is gone" in engine.failure
    answers = Answers()
    engine.start(request("a"), answers)
    completion = answers.wait(1)["a"]
    assert completion.finish_reason is FinishReason.ERROR
    assert "the disk is gone" in completion.error
    monkeypatch.undo()
    with pytest.raises(PolicyError, match="the disk is gone"):
        engine.load_weights(tmp_path / "w.safetensors", version=2)


@pytest.mark.parametrize("allowed", [None, ("go", "take")], ids=["free", "constrained"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_give_errors_and_no_completions(engine, allowed, temperature):
    good = engine._engine.model.get_input_embeddings().weight
    before = good.detach().clone()
    answers = Answers()
    with torch.no_grad():
        good.fill_(float("nan"))
    engine.start(request("a", allowed=allowed, temperature=temperature), answers)
    completion = answers.wait(1)["a"]
    assert completion.finish_reason is FinishReason.ERROR
    assert "expected finite logits" in completion.error
    with torch.no_grad():
        good.copy_(before)
    engine.start(request("b", allowed=allowed, temperature=temperature), answers)
    assert answers.wait(2)["b"].finish_reason is not FinishReason.ERROR


def test_weights_of_whole_numbers_are_refused(engine, tmp_path):
    tensors, _ = checkpoint_tensors(engine._engine.model)
    whole = {name: tensor.to(torch.int32) for name, tensor in tensors.items()}
    write_weights(tmp_path / "w.safetensors", whole)
    with pytest.raises(WeightsError, match=r"expected floating-point numbers for `.*`, got I32"):
        engine.load_weights(tmp_path / "w.safetensors", version=1)
    assert engine.policy_version == 0
