"""Checkpoints that are damaged, and folders that cannot hold any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the 'trainers' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'trainers' extra")

from longstep.errors import ConfigError  # noqa: E402
from longstep_trainers.checkpoints import (  # noqa: E402
    TrainerState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from longstep_trainers.model import apply_lora  # noqa: E402
from longstep_trainers.optimization import MasterAdamW  # noqa: E402


class NoTokenizer:
    """Stands where the tokenizer is saved; this test reads none."""

    def save_pretrained(self, folder: Path) -> None:
        return None


def tiny(*, lora: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, MasterAdamW]:
    sizes = {
        "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | settings))
    if lora is not None:
        model = apply_lora(model, **lora)
    return model, MasterAdamW(model, betas=(0.9, 0.999), weight_decay=0.0)


def saved(output_dir: Path, iteration: int = 3, **settings: Any) -> Path:
    """A checkpoint of a model of such settings."""
    model, optimizer = tiny(**settings)
    return save_checkpoint(
        output_dir,
        model=model,
        tokenizer=NoTokenizer(),
        optimizer=optimizer,
        state=TrainerState(iteration=iteration),
    )


def load(folder: Path, **settings: Any) -> TrainerState:
    """Load a checkpoint into a model of such settings."""
    model, optimizer = tiny(**settings)
    use_lora = "lora" in settings
    return load_checkpoint(folder, model=model, optimizer=optimizer, use_lora=use_lora)


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_one_error_that_names_it(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = saved(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"expected a whole checkpoint.*iteration-000003"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, "differs in `env_steps`, `eval_success_before`, `iteration`"),
        (lambda state: [], "the counters of a run"),
        (lambda state: {**state, "epoch": 1}, "differs in `epoch`"),
        (lambda state: {**state, "iteration": -1}, "at least 0 as `iteration`, got -1"),
        (lambda state: {**state, "iteration": None}, "at least 0 as `iteration`, got None"),
        (lambda state: {**state, "env_steps": 1.5}, "as `env_steps`, got 1.5"),
        (lambda state: {**state, "env_steps": True}, "as `env_steps`, got True"),
        (lambda state: {**state, "train_seconds": "9"}, "as `train_seconds`, got '9'"),
    ],
)
def test_counters_that_are_missing_or_nonsense_do_not_begin_at_0_again(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    file = saved(tmp_path) / "state.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ConfigError, match=message):
        load(file.parent)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}, {"lora": {}}])
def test_a_checkpoint_loads_with_the_settings_it_was_made_with(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert load(saved(tmp_path, **settings), **settings).iteration == 3


@pytest.mark.parametrize("settings", [{}, {"lora": {}}])
def test_missing_weights_are_noticed(tmp_path: Path, settings: dict[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, **settings)
    (file,) = (folder / "model").glob("*.safetensors")
    weights = load_file(file)
    name = sorted(weights)[-1]
    save_file({key: value for key, value in weights.items() if key != name}, file)
    with pytest.raises(ConfigError, match=f"got none for `{name}`"):
        load(folder, **settings)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"num_attention_heads": 2}, "expected a model with `head_dim` 8"),
        ({}, {"rms_norm_eps": 0.1}, "with `rms_norm_eps` 1e-06, .* got 0.1"),
        ({}, {"hidden_size": 16}, "."),
        ({}, {"num_hidden_layers": 2}, r"got none for `model\.layers\.1\."),
        ({"num_hidden_layers": 2}, {}, r"got unknown ones such as `model\.layers\.1\."),
        ({"lora": {"alpha": 4}}, {"lora": {}}, "with `lora_alpha` 4, .* got 16"),
        ({"lora": {"r": 4}}, {"lora": {}}, "with `r` 4, .* got 8"),
        ({"lora": {}}, {"lora": {"target_modules": ["q_proj"]}}, "unknown ones such as"),
        ({"lora": {"target_modules": ["q_proj"]}}, {"lora": {}}, "got none for"),
        ({}, {"lora": {}}, "adapter_model.safetensors"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(saved(tmp_path, **before), **after)


def test_the_newest_checkpoint_is_that_of_the_highest_number(tmp_path: Path) -> None:
    for iteration in (999_999, 1_000_000):
        saved(tmp_path, iteration)
    (tmp_path / "checkpoints" / "iteration-2000000.bak").mkdir()
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoints" / "iteration-1000000"


def test_two_checkpoints_stay_and_what_killed_runs_left_goes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for iteration in (1, 2, 3, 3):
        saved(tmp_path, iteration)
        (folder / ".iteration-000009.partial" / "model").mkdir(parents=True)
        (folder / ".iteration-000002.removed").mkdir()
    saved(tmp_path, 4)
    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration-000003",
        "iteration-000004",
    ]


@pytest.mark.parametrize("below", ["", "run", "run/deeper"])
def test_an_output_dir_that_is_a_file_is_refused_before_anything_is_loaded(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ConfigError, match="taken` at `output_dir`"):
        find_checkpoint(tmp_path / "taken" / below, None)
