"""The in-process engine against plain full forwards of the same model."""

import random

import numpy as np
import pytest
import torch
import transformers

from longstep.errors import ConfigError
from longstep.policy import Engine, EnginePolicy
from longstep.types import FinishReason, GenerationRequest, Message, Prompt
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_trainers.model import apply_lora, build_embedded

WORDS = (
    "room", "door", "key", "north", "south", "east", "west", "you", "are", "in", "the", "red", "blue",
    "green", "closed", "open",
)  # fmt: skip
ACTIONS = ("go north", "go south", "go east", "go", "take key", "open the door")
WILD = ("go", "go north", "öffne die Tür", "go north now", "左へ行く", "左へ", "go northern")


def other_family(name: str, like: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(
        name,
        vocab_size=like.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=like.eos_token_id,
        pad_token_id=like.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa"
        ).eval()


def observation(seed: int, num_words: int = 18) -> str:
    player = random.Random(seed)
    words = " ".join(player.choice(WORDS) for _ in range(num_words))
    return f"You play a game of rooms, keys and doors. You see: {words}."


def sharpen(model):
    """Make the weights so large that the distributions are far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)


def build_parts():
    texts = [observation(seed) for seed in range(50)]
    model, tokenizer = build_embedded(texts, actions=ACTIONS, max_length=256)
    sharpen(model)
    return model, tokenizer


@pytest.fixture(scope="module")
def parts():
    return build_parts()


@pytest.fixture
def engine(parts):
    return TransformersEngine(*parts)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "lora"])
def any_parts(request):
    """The embedded model, and small ones of other families that take other paths through the engine."""
    model, tokenizer = build_parts()
    if request.param in ("qwen2", "qwen3"):
        model = other_family(request.param, model.config)
        sharpen(model)
    if request.param == "lora":
        model = apply_lora(model, target_modules=["q_proj", "up_proj"]).eval()
        with torch.no_grad():  # a fresh adapter changes nothing; this one must
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(0))
    return model, tokenizer


def request(number: int, text: str | None = None, **settings) -> GenerationRequest:
    prompt = Prompt(messages=(Message(role="user", content=text or observation(number)),))
    settings = {"seed": number, "max_tokens": 12, **settings}
    return GenerationRequest(request_id=f"r{number}", prompt=prompt, **settings)


def reference_logprobs(model, completion, temperature=1.0):
    """Log-probabilities from one full forward without cache, padding or batch."""
    ids = np.concatenate([completion.prompt_token_ids, completion.token_ids]).astype(np.int64)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float()
    start = len(completion.prompt_token_ids) - 1
    values = []
    for position, token_id in enumerate(completion.token_ids.tolist()):
        row = logits[start + position] / temperature
        if completion.allowed_token_ids is not None:
            allowed = torch.from_numpy(completion.allowed_token_ids[position].astype(np.int64))
            masked = torch.full_like(row, float("-inf"))
            masked[allowed] = row[allowed]
            row = masked
        values.append(row.log_softmax(-1)[token_id].item())
    return np.array(values, dtype=np.float32)


def assert_same(left, right):
    assert left.token_ids.tolist() == right.token_ids.tolist()
    assert left.text == right.text
    assert left.finish_reason == right.finish_reason
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)


def mixed_requests() -> list[GenerationRequest]:
    """Free and constrained, long and short, equal and different prompts, all in one batch."""
    return [
        *(request(n, max_tokens=3 + n % 9) for n in range(8)),
        *(request(n, observation(3), max_tokens=6) for n in range(8, 14)),
        *(request(n, observation(n, 4 + n), allowed=ACTIONS) for n in range(14, 24)),
        *(request(n, observation(3), allowed=WILD, max_tokens=64) for n in range(24, 40)),
        *(request(n, temperature=0.5 + n / 40) for n in range(40, 44)),
        *(request(n, observation(n, 1), top_p=0.7) for n in range(44, 50)),
    ]


def test_it_is_an_engine_and_serves_a_policy(engine):
    assert isinstance(engine, Engine)
    policy = EnginePolicy(engine)
    policy.submit([request(0), request(1)])
    assert {completion.request_id for completion in policy.poll(0.0)} == {"r0", "r1"}


def test_logprobs_equal_those_of_a_plain_forward_under_the_same_mask(any_parts):
    requests = mixed_requests()
    completions = TransformersEngine(*any_parts).generate(requests)
    for asked, completion in zip(requests, completions, strict=True):
        assert completion.error is None
        assert completion.request_id == asked.request_id
        expected = reference_logprobs(any_parts[0], completion, asked.temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_result_does_not_depend_on_the_rest_of_the_batch(any_parts):
    engine = TransformersEngine(*any_parts)
    requests = mixed_requests()
    together = engine.generate(requests)
    shuffled = list(range(len(requests)))
    random.Random(1).shuffle(shuffled)
    small = TransformersEngine(*any_parts, max_batch_tokens=200)
    again = small.generate([requests[i] for i in shuffled])
    for place, number in enumerate(shuffled):
        assert_same(together[number], again[place])
    for asked, completion in list(zip(requests, together, strict=True))[::5]:
        assert_same(completion, engine.generate([asked])[0])


def test_the_same_call_twice_gives_the_same_bytes(engine):
    engine.reset_cache()
    first = engine.generate(mixed_requests())
    engine.reset_cache()
    second = engine.generate(mixed_requests())
    for left, right in zip(first, second, strict=True):
        assert left.token_ids.tobytes() == right.token_ids.tobytes()
        assert left.logprobs.tobytes() == right.logprobs.tobytes()


def test_seeds_give_independent_draws_of_the_right_frequencies(engine):
    requests = [request(n, observation(0), allowed=ACTIONS) for n in range(1000)]
    completions = engine.generate(requests)
    assert len({completion.text for completion in completions}) > 3
    # "go" is a single token apart from its longer forms, so every action is one choice among six.
    for action in ACTIONS:
        chosen = [c for c in completions if c.text == action]
        if chosen:
            probability = float(np.exp(chosen[0].logprobs.sum()))
            deviation = np.sqrt(probability * (1 - probability) / len(completions))
            assert abs(len(chosen) / len(completions) - probability) < 5 * deviation + 1e-3


def test_temperature_zero_takes_the_most_probable_token(parts, engine):
    completion = engine.generate([request(0, temperature=0.0, max_tokens=8)])[0]
    ids = np.concatenate([completion.prompt_token_ids, completion.token_ids]).astype(np.int64)
    with torch.inference_mode():
        best = parts[0](input_ids=torch.from_numpy(ids)[None]).logits[0].argmax(-1).numpy()
    start = len(completion.prompt_token_ids) - 1
    assert completion.token_ids.tolist() == best[start:-1].tolist()
    np.testing.assert_allclose(
        completion.logprobs, reference_logprobs(parts[0], completion), atol=1e-4
    )


def test_a_tiny_top_p_is_greedy(engine):
    narrow = engine.generate([request(n, top_p=1e-6) for n in range(8)])
    greedy = engine.generate([request(n, temperature=0.0) for n in range(8)])
    assert [c.token_ids.tolist() for c in narrow] == [c.token_ids.tolist() for c in greedy]


def test_a_free_completion_ends_at_the_end_of_turn(parts):
    model, tokenizer = parts
    engine = TransformersEngine(model, tokenizer)
    completions = engine.generate([request(n, max_tokens=200) for n in range(40)])
    ended = [c for c in completions if c.finish_reason is FinishReason.STOP]
    assert ended, "no sample ended its turn; the test needs other weights"
    for completion in ended:
        assert completion.token_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in completion.token_ids[:-1]
        assert "<|end|>" not in completion.text
    for completion in completions:
        if completion.finish_reason is FinishReason.LENGTH:
            room = 256 - len(completion.prompt_token_ids)
            assert len(completion.token_ids) == min(200, room)


def test_a_stop_string_ends_the_completion_and_stays_out_of_its_text(engine):
    free = engine.generate([request(5, max_tokens=40)])[0]
    stop = free.text[len(free.text) // 2 :][:3]
    stopped = engine.generate([request(5, max_tokens=40, stop=("never there", stop))])[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids.tolist() == free.token_ids[: len(stopped.token_ids)].tolist()


@pytest.mark.parametrize("allowed", [ACTIONS, WILD])
def test_a_constrained_completion_is_exactly_one_of_the_strings(parts, engine, allowed):
    _, tokenizer = parts
    requests = [request(n, allowed=allowed, max_tokens=64) for n in range(100)]
    completions = engine.generate(requests)
    for completion in completions:
        assert completion.text in allowed
        assert completion.finish_reason is FinishReason.STOP
        assert len(completion.allowed_token_ids) == len(completion.token_ids)
        kept = [i for i in completion.token_ids.tolist() if i != tokenizer.eos_token_id]
        assert tokenizer.decode(kept) == completion.text
        for token_id, ids, logprob in zip(
            completion.token_ids, completion.allowed_token_ids, completion.logprobs, strict=True
        ):
            assert token_id in ids
            assert (logprob == 0.0) == (len(ids) == 1)
    assert len({completion.text for completion in completions}) >= 4


def test_the_end_of_turn_is_an_option_only_where_one_string_begins_another(parts, engine):
    _, tokenizer = parts
    # Without actions of its own the words are single tokens: "the" begins "the red key".
    completions = engine.generate(
        [request(n, allowed=("the", "the red key", "a")) for n in range(60)]
    )
    by_text = {completion.text: completion for completion in completions}
    assert set(by_text) == {"the", "the red key", "a"}
    assert by_text["the"].token_ids[-1] == tokenizer.eos_token_id
    assert by_text["the red key"].token_ids[-1] != tokenizer.eos_token_id
    assert by_text["a"].token_ids[-1] != tokenizer.eos_token_id


class _Counting:
    """Counts the positions that the model computes."""

    def __init__(self, model):
        self.positions = 0
        self.handle = model.get_input_embeddings().register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.positions += args[0].numel()


@pytest.fixture
def counting(parts):
    counter = _Counting(parts[0])
    yield counter
    counter.handle.remove()


def test_a_single_allowed_string_costs_no_forward_pass(engine, counting):
    completion = engine.generate([request(0, allowed=("go northern lights",), max_tokens=64)])[0]
    assert completion.text == "go northern lights"
    assert not completion.logprobs.any()
    assert counting.positions == 0


def test_equal_prompts_and_a_shared_beginning_are_computed_once(parts, counting):
    engine = TransformersEngine(*parts)
    alone = engine.generate([request(0, allowed=ACTIONS)])[0]
    length = len(alone.prompt_token_ids)
    counting.positions = 0
    engine = TransformersEngine(*parts)
    engine.generate([request(n, observation(0), allowed=ACTIONS) for n in range(64)])
    assert counting.positions == length
    counting.positions = 0
    engine.generate([request(n, allowed=ACTIONS) for n in range(2)])
    assert counting.positions < 2 * length


def test_training_mode_is_restored_and_dropout_plays_no_part(parts, engine):
    model, _ = parts
    model.train()
    try:
        engine.generate([request(0)])
        assert model.training
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text": "x" * 100_000}, "expected a prompt of 1 to 255 tokens, got 100002"),
        ({"allowed": ()}, "expected at least one `allowed` string, got none"),
        (
            {"allowed": ("unbekanntes Wort", "y"), "max_tokens": 3},
            "room for the longest of `allowed`",
        ),
        ({"max_tokens": 0}, "expected `max_tokens` >= 1"),
        ({"temperature": -1.0}, "`temperature` >= 0"),
        ({"top_p": 0.0}, "0 < `top_p` <= 1"),
    ],
)
def test_a_bad_request_is_one_failed_completion(engine, settings, message):
    good = request(1)
    before, failed, after = engine.generate([good, request(2, **settings), good])
    assert failed.finish_reason is FinishReason.ERROR
    assert message in failed.error
    assert_same(before, after)
    assert_same(before, engine.generate([good])[0])


def test_a_prompt_with_an_image_is_one_failed_completion(engine):
    image = np.zeros((2, 2, 3), dtype=np.uint8)
    prompt = Prompt(messages=(Message(role="user", content="look"),), images=(image,))
    failed, good = engine.generate([GenerationRequest(request_id="a", prompt=prompt), request(1)])
    assert "without images" in failed.error
    assert good.error is None


def test_a_prompt_that_the_template_rejects_spoils_no_other(parts):
    model, tokenizer = parts
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    )
    try:
        bad = GenerationRequest(
            request_id="bad", prompt=Prompt(messages=(Message(role="system", content="s"),))
        )
        failed, good = TransformersEngine(model, tokenizer).generate([bad, request(1)])
    finally:
        tokenizer.chat_template = template
    assert "no system" in failed.error
    assert good.error is None


def test_a_completion_never_runs_over_the_context(engine):
    full = " ".join(["the"] * 250)
    completion = engine.generate([request(0, full, max_tokens=500)])[0]
    assert completion.error is None
    assert len(completion.prompt_token_ids) + len(completion.token_ids) <= 256


def test_the_policy_version_is_on_every_completion(parts):
    engine = TransformersEngine(*parts, policy_version=3)
    engine.policy_version += 1
    assert engine.generate([request(0)])[0].policy_version == 4


def test_no_requests_give_no_completions(engine):
    assert engine.generate([]) == []


def test_a_tokenizer_without_a_chat_template_is_refused(parts):
    model, tokenizer = parts
    template = tokenizer.chat_template
    tokenizer.chat_template = None
    try:
        with pytest.raises(ConfigError, match="expected a tokenizer with a chat template"):
            TransformersEngine(model, tokenizer)
    finally:
        tokenizer.chat_template = template


def test_bfloat16_weights_work(parts):
    model, tokenizer = parts
    engine = TransformersEngine(model.to(torch.bfloat16), tokenizer)
    try:
        completions = engine.generate(mixed_requests())
    finally:
        model.to(torch.float32)
    assert all(completion.error is None for completion in completions)
    assert all(completion.logprobs.dtype == np.float32 for completion in completions)


def test_a_choice_known_for_these_weights_costs_no_forward_pass_and_is_the_same(parts, counting):
    engine = TransformersEngine(*parts)
    allowed = ("north", "south", "east")
    requests = [request(number, observation(number % 3), allowed=allowed) for number in range(12)]
    first = engine.generate(requests)
    counting.positions = 0
    again = engine.generate(requests)
    assert counting.positions == 0
    for left, right in zip(first, again, strict=True):
        assert_same(left, right)


def test_known_choices_are_forgotten_when_weights_or_version_change(parts):
    model, tokenizer = build_parts()
    engine = TransformersEngine(model, tokenizer)
    one = request(0, allowed=("north", "south", "east"))
    before = engine.generate([one])[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    after = engine.generate([one])[0]
    assert after.logprobs[0] != before.logprobs[0]
    np.testing.assert_allclose(after.logprobs, reference_logprobs(model, after), atol=1e-4)
    engine.policy_version = 5
    assert engine.generate([one])[0].policy_version == 5
