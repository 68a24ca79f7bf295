"""Prompts with images at a vLLM engine, with a tiny model of the Idefics3 architecture, against transformers."""

from typing import Any

import numpy as np
import pytest
from tests.bindings.engines.vllm_rig import ask, save, vllm_marks

from longstep.errors import DataError
from longstep.types import FinishReason, GenerationRequest, Message, Prompt
from longstep_bindings.engines.served import ScoreRow
from longstep_bindings.engines.transformers_engine import TransformersEngine

pytestmark = vllm_marks
NOISE = 1e-3
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
WORDS = ["<pad>", "<s>", "<end>", *MARKS, *ROWS, "<unk>", "up", "down", "left", "right", "go"]
TEMPLATE = (
    "{% for m in messages %}<s>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def tiny_vision_processor() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=[*MARKS, *ROWS],
    )
    tokenizer.chat_template = TEMPLATE
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": 56}, max_image_size={"longest_edge": 56}
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


def tiny_vision_model() -> Any:
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    size = {"intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
    config = Idefics3Config(
        image_token_id=WORDS.index("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        vision_config={
            **size,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        text_config={
            **size,
            "model_type": "llama",
            "vocab_size": len(WORDS),
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Idefics3ForConditionalGeneration(config).eval()


def _image(seed):
    return np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def _request(name, text, *images, **settings):
    prompt = Prompt(messages=(Message(role="user", content=text),), images=images)
    return GenerationRequest(request_id=name, prompt=prompt, **settings)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """vLLM's and transformers' engine of one model."""
    pytest.importorskip("vllm")
    from longstep_bindings.engines.image_prompts import load_processor
    from longstep_bindings.engines.vllm_engine import VLLMEngine

    processor, model = tiny_vision_processor(), tiny_vision_model()
    folder = save(tmp_path_factory.mktemp("vision"), model, processor.tokenizer)
    processor.save_pretrained(folder)
    engine = VLLMEngine(folder, num_threads=1, kv_cache_gib=0.25)
    yield (
        engine,
        TransformersEngine(
            model, processor.tokenizer, processor=load_processor(folder, processor.tokenizer)
        ),
    )
    engine.close()


def test_images_reach_the_model_and_each_distinct_one_counts(engines):
    engine, reference = engines
    assert engine.description.takes_images
    requests = [
        _request(f"r{i}", "go <image> up <image> left", _image(i), _image(i // 2), seed=i)
        for i in range(6)
    ]
    requests = [*requests, *(_request(f"t{i}", "go up", seed=i) for i in range(2))]
    requests += [
        _request(f"c{i}", "<image><image>", _image(i), _image(9), seed=i, allowed=("go up", "go"))
        for i in range(6)
    ]
    ours, theirs = ask(engine, requests), reference.generate(requests)
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None
        # The same ids, with the room that the model takes for the images.
        np.testing.assert_array_equal(one.prompt_token_ids, other.prompt_token_ids)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        assert np.abs(one.logprobs - other.logprobs).max() < NOISE
    choices = [float(completion.logprobs.sum()) for completion in ours[8:]]
    assert len({round(value, 4) for value in choices}) > 2


def test_images_without_a_place_or_places_without_an_image_are_an_error(engines):
    engine, _ = engines
    requests = [
        _request("many", "go", _image(0)),
        _request("few", "<image> go <image>", _image(0)),
        _request("good", "<image>", _image(0), max_tokens=2),
    ]
    many, few, good = ask(engine, requests)
    for bad, num_places in ((many, 0), (few, 2)):
        assert bad.finish_reason is FinishReason.ERROR
        assert f"once for each of 1 images in the prompt, got it {num_places} times" in bad.error
    assert good.error is None


def test_scores_of_rows_that_vllm_cannot_rebuild_are_refused(engines):
    engine, reference = engines
    request = _request("r", "go <image>", _image(0), max_tokens=3)
    (completion,) = reference.generate([request])
    row = ScoreRow(
        prompt_token_ids=completion.prompt_token_ids,
        token_ids=completion.token_ids,
        images=request.prompt.images,
    )
    with pytest.raises(DataError, match="can be scored with transformers"):
        engine.score([row])
