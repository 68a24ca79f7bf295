"""Checkpoints: what a killed run needs to go on exactly as if it had not been.

A checkpoint is a folder `checkpoints/iteration-NNNNNN` with the model folder (or the adapter alone), the optimizer's
state and `state.json`. It is written under another name and renamed when complete, so a folder with that name is whole.
Everything random in a run is derived from (seed, iteration); no generator state has to be kept.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstep.errors import ConfigError

if TYPE_CHECKING:
    from longstep_trainers.optimization import MasterAdamW

__all__ = ["TrainerState", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

_KEEP = 2
"""Newest checkpoints that stay on disk: one to resume, one more should the disk have lost the newest."""

_ADAPTER_KEYS = ("lora_alpha", "r", "target_modules", "use_rslora", "use_dora", "bias")
"""What decides what an adapter computes; whatever else peft notes is of its version."""
_PASSING_KEYS = {"transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype"}
"""Keys of a model's config that say where it came from, not what it computes."""


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
    import torch

    folder = output_dir / "checkpoints" / f"iteration-{state.iteration:06d}"
    partial = folder.with_name(f".{folder.name}.partial")
    for left in folder.parent.glob(
        ".iteration-*"
    ):  # by a run that was killed while it wrote or removed one
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial / "model", max_shard_size="1000GB")  # one file, read back as one
    tokenizer.save_pretrained(partial / "model")
    torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    if folder.exists():  # saved twice, or left by a run that was resumed from further back
        _remove(folder)
    partial.rename(folder)
    for old in _present(output_dir)[:-_KEEP]:
        _remove(old)
    return folder


def _remove(folder: Path) -> None:
    """Remove a checkpoint; at no time is there a folder of its name that holds only half of it."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _present(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    folders = (output_dir / "checkpoints").glob("iteration-*")
    numbered = {path: re.fullmatch(r"iteration-(\d+)", path.name) for path in folders}
    known = {path: int(match[1]) for path, match in numbered.items() if match}
    return sorted(known, key=known.__getitem__)


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
    present = _present(output_dir)
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
    import torch
    from safetensors.torch import load_file

    state = _read_state(folder / "state.json")
    weights = load_file(
        folder / "model" / ("adapter_model.safetensors" if use_lora else "model.safetensors")
    )
    _require_weights(model, weights, use_lora=use_lora, folder=folder)
    _require_settings(model, use_lora=use_lora, folder=folder)
    if use_lora:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, weights)
    else:
        model.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return state


def _read_state(path: Path) -> TrainerState:
    """The counters of a checkpoint, every one of them: a missing one would begin at 0 again."""
    found = json.loads(path.read_text())
    names = {field.name for field in fields(TrainerState)}
    if not isinstance(found, dict) or set(found) != names:
        given = set(found) if isinstance(found, dict) else set()
        different = ", ".join(f"`{name}`" for name in sorted(names ^ given))
        raise ConfigError(
            f"expected the counters of a run, got others at `{path}`, which differs in {different}; name another "
            "checkpoint at `--resume`"
        )
    for name, value in found.items():
        if name == "eval_success_before" and value is None:
            continue
        kinds = (int, float) if name in ("train_seconds", "eval_success_before") else (int,)
        if type(value) not in kinds or not 0 <= float(value or 0) < math.inf:
            raise ConfigError(
                f"expected a number of at least 0 as `{name}`, got {value!r} at `{path}`; name another checkpoint at "
                "`--resume`"
            )
    return TrainerState(**found)


def _require_weights(model: Any, weights: dict[str, Any], *, use_lora: bool, folder: Path) -> None:
    """Raise unless the file holds every weight of the model, and no other.

    A tensor that several names share is stored under one of them.
    """
    if use_lora:
        from peft import get_peft_model_state_dict

        expected = get_peft_model_state_dict(model)
    else:
        expected = model.state_dict()
    places = {name: tensor.data_ptr() for name, tensor in expected.items()}
    stored = {places[name] for name in weights if name in places}
    missing = [name for name, place in places.items() if place not in stored]
    unknown = sorted(set(weights) - set(places))
    if unknown or missing:
        got = f"unknown ones such as `{unknown[0]}`" if unknown else f"none for `{missing[0]}`"
        raise ConfigError(
            f"expected the weights of this model, got {got} in `{folder}`; resume with the settings that the run was "
            "started with"
        )


def _require_settings(model: Any, *, use_lora: bool, folder: Path) -> None:
    """Raise where the model is set up otherwise than the checkpoint's, although its weights would fit."""
    if use_lora:
        path = folder / "model" / "adapter_config.json"
        (adapter,) = model.peft_config.values()
        now = json.loads(json.dumps(adapter.to_dict(), default=_as_text))
        keys = _ADAPTER_KEYS
    else:
        path = folder / "model" / "config.json"
        now = json.loads(model.config.to_json_string(use_diff=False))
        keys = tuple(sorted(now.keys() - _PASSING_KEYS))
    saved = json.loads(path.read_text())
    for key in keys:
        if key in saved and key in now and not _same(saved[key], now[key]):
            raise ConfigError(
                f"expected a model with `{key}` {saved[key]!r}, as in `{path}`, got {now[key]!r}; resume with the "
                "settings that the run was started with"
            )


def _as_text(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def _same(old: Any, new: Any) -> bool:
    """Equal, but for the order of names: peft keeps them in a set."""
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(x, str) for x in old):
        return sorted(old) == sorted(map(str, new))
    return old == new
