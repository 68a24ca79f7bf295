"""Checkpoints: what a killed run needs to go on exactly as if it had not been.

A checkpoint is a folder `checkpoints/iteration-NNNNNN` with the model folder (or the adapter alone), the optimizer's
state and `state.json`. It is written under another name and renamed when complete, so a folder with that name is whole.
Everything random in a run is derived from (seed, iteration); no generator state has to be kept.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from longstep.errors import ConfigError
from longstep_trainers.optimization import MasterAdamW

__all__ = ["TrainerState", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

_KEEP = 2
"""Newest checkpoints that stay on disk: one to resume, one more should the disk have lost the newest."""


@dataclass(kw_only=True)
class TrainerState:
    """Where a run stands: counters that advance with it."""

    iteration: int = 0
    """Iterations completed."""
    env_steps: int = 0
    """Environment steps collected."""
    optimizer_steps: int = 0
    policy_version: int = 0
    """Times that the engine took over new weights."""
    task_position: int = 0
    """Where the stream of training tasks stands."""
    eval_success_before: float | None = None
    """Success on the held-out panel before the first update."""
    train_seconds: float = 0.0
    """Wall time of rollouts and updates."""


def save_checkpoint(
    output_dir: Path, *, model: Any, tokenizer: Any, optimizer: MasterAdamW, state: TrainerState
) -> Path:
    """The folder of a new checkpoint; older ones but the last two are removed."""
    folder = output_dir / "checkpoints" / f"iteration-{state.iteration:06d}"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial / "model", max_shard_size="1000GB")  # one file, read back as one
    tokenizer.save_pretrained(partial / "model")
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was resumed from further back
    partial.rename(folder)
    for old in sorted(folder.parent.glob("iteration-*"))[:-_KEEP]:
        shutil.rmtree(old)
    return folder


def find_checkpoint(output_dir: Path, resume: str | None) -> Path | None:
    """The checkpoint to go on from; None to start afresh.

    Args:
        output_dir: Folder of the run.
        resume: A checkpoint folder, `auto` for the newest one in `output_dir`, or None.

    Raises:
        ConfigError: the named folder is no checkpoint, `output_dir` is no folder that can be written to, or a run would
            overwrite another one.
    """
    for place in (output_dir, *output_dir.parents):
        if place.exists():
            if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
                raise ConfigError(
                    f"expected a folder that can be written to, got `{place}` at `output_dir`; name another folder"
                )
            break
    present = sorted((output_dir / "checkpoints").glob("iteration-*"))
    if resume is None:
        if present:
            raise ConfigError(
                f"expected an `output_dir` without checkpoints, got `{output_dir}` with `{present[-1].name}`; "
                "go on from it with `--resume auto`, or choose another `output_dir`"
            )
        return None
    if resume == "auto":
        return present[-1] if present else None
    folder = Path(resume)
    if not (folder / "state.json").is_file():
        raise ConfigError(
            f"expected a checkpoint folder with `state.json`, got `{resume}` at `resume`; name a folder "
            "`checkpoints/iteration-...`, or pass `auto`"
        )
    return folder


def load_checkpoint(
    folder: Path, *, model: Any, optimizer: MasterAdamW, use_lora: bool
) -> TrainerState:
    """The state of a checkpoint, with its weights and running means taken over in place.

    Raises:
        ConfigError: a file is damaged or missing, or belongs to a run with other settings.
    """
    try:
        return _load(folder, model=model, optimizer=optimizer, use_lora=use_lora)
    except ConfigError:
        raise
    except Exception as error:  # what reading a damaged file may raise is anything
        raise ConfigError(
            f"expected a whole checkpoint of this run at `{folder}`, but loading failed with "
            f"{type(error).__name__}: {error}; resume with the settings that the run was started with, or name another "
            "checkpoint at `--resume`"
        ) from error


def _load(folder: Path, *, model: Any, optimizer: MasterAdamW, use_lora: bool) -> TrainerState:
    from safetensors.torch import load_file

    weights = load_file(
        folder / "model" / ("adapter_model.safetensors" if use_lora else "model.safetensors")
    )
    if use_lora:
        from peft import set_peft_model_state_dict

        unexpected = set_peft_model_state_dict(model, weights).unexpected_keys
    else:
        # Tied weights are stored once and are the missing ones; anything unknown is another model.
        unexpected = model.load_state_dict(weights, strict=False).unexpected_keys
    if unexpected:
        raise ConfigError(
            f"expected the weights of this model, got unknown ones such as `{unexpected[0]}` in `{folder}`; "
            "resume with the settings that the run was started with"
        )
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return TrainerState(**json.loads((folder / "state.json").read_text()))
