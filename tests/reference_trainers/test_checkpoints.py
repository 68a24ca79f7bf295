"""Checkpoints that are damaged, and folders that cannot hold any."""

from __future__ import annotations

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
from longstep_trainers.optimization import MasterAdamW  # noqa: E402


class NoTokenizer:
    """Stands where the tokenizer is saved; this test reads none."""

    def save_pretrained(self, folder: Path) -> None:
        return None


def tiny() -> tuple[Any, MasterAdamW]:
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = transformers.LlamaForCausalLM(config)
    return model, MasterAdamW(model, betas=(0.9, 0.999), weight_decay=0.0)


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_one_error_that_names_it(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    model, optimizer = tiny()
    folder = save_checkpoint(
        tmp_path,
        model=model,
        tokenizer=NoTokenizer(),
        optimizer=optimizer,
        state=TrainerState(iteration=3),
    )
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"expected a whole checkpoint.*iteration-000003"):
        load_checkpoint(folder, model=model, optimizer=optimizer, use_lora=False)


@pytest.mark.parametrize("below", ["", "run", "run/deeper"])
def test_an_output_dir_that_is_a_file_is_refused_before_anything_is_loaded(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ConfigError, match="taken` at `output_dir`"):
        find_checkpoint(tmp_path / "taken" / below, None)
