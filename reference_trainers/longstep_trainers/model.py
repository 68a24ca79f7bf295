"""Models for trainers: the embedded one, folders in Hugging Face form, low-rank adapters."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longstep.errors import ConfigError, did_you_mean, require
from longstep_trainers.embedded import Corpus, build_embedded, build_tokenizer, corpus_of
from longstep_trainers.packaged_models import list_models, missing_parts, pull_model

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Corpus",
    "apply_lora",
    "build_embedded",
    "build_tokenizer",
    "corpus_of",
    "list_models",
    "load_model",
    "preferred_dtype",
    "pull_model",
]

DType = Literal["auto", "float32", "bfloat16", "float16"]


def load_model(
    path: str | Path, *, dtype: DType = "auto", device: str | None = None, attn: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model of a folder and its tokenizer, in eval mode on `device`.

    Args:
        path: A folder in Hugging Face form, or a name such as `owner/model` that transformers finds in its cache or on its
            hub.
        dtype: Number format of the weights; `auto` is `preferred_dtype` of the device.
        device: None means CUDA where there is a device, else the CPU.
        attn: Attention implementation of transformers; None means flash attention where it is installed and the device
            is CUDA, else `sdpa`.

    Raises:
        ConfigError: The folder does not exist, lacks files, or holds something else than a causal language model.
    """
    torch = require("torch", extra="trainers", needed_by="load_model")
    transformers = require("transformers", extra="trainers", needed_by="load_model")
    _check_folder(Path(path))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch_dtype = preferred_dtype(device) if dtype == "auto" else getattr(torch, dtype)
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch_dtype,
            attn_implementation=attn or _fastest_attention(device, torch_dtype),
            output_loading_info=True,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # whatever a broken folder makes transformers raise
        raise ConfigError(
            f"expected a causal language model in Hugging Face form at `{path}`, but loading failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(
            f"expected weights for every parameter at `{path}`, got none for {len(missing)} of them, such as "
            f"`{missing[0]}`; the file is incomplete or of another architecture than `config.json` says"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def _check_folder(path: Path) -> None:
    """Raise when `path` is no complete model folder, unless it can only be the name of a model on a hub."""
    if path.is_dir():
        missing = missing_parts(path)
        if missing:
            hint = (
                "; it holds an adapter: pass the folder of its base model"
                if (path / "adapter_config.json").is_file()
                else ""
            )
            raise ConfigError(
                f"expected a complete model folder, got `{path}` without {', '.join(missing)}{hint}"
            )
        return
    is_hub_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) and not path.parent.exists()
    if not is_hub_name:
        siblings = path.parent.iterdir() if path.parent.is_dir() else ()
        names = [sibling.name for sibling in siblings if sibling.is_dir()]
        near = did_you_mean(path.name, names) if names else "its parent holds no folders"
        raise ConfigError(f"expected a model folder, got `{path}`, which does not exist; {near}")


def preferred_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device multiplies it faster than float32 (CUDA, CPUs with AMX or AVX512-BF16), else float32."""
    import torch

    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.startswith("cpu"):
        probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        if any(getattr(torch.cpu, probe, lambda: False)() for probe in probes):
            return torch.bfloat16
    return torch.float32


def _fastest_attention(device: str, dtype: torch.dtype) -> str:
    import torch
    from transformers.utils.import_utils import is_flash_attn_2_available

    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.startswith("cuda") and is_half and is_flash_attn_2_available():
        return "flash_attention_2"
    return "sdpa"


def apply_lora(
    model: PreTrainedModel,
    *,
    r: int = 8,
    alpha: int = 16,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    seed: int = 0,
) -> PeftModel:
    """`model` with a fresh low-rank adapter, the only part of it that is trainable. It computes what it computed before.

    Args:
        model: A causal language model; its layers are replaced in place.
        r: Rank.
        alpha: Scale; the adapter's effect is multiplied by `alpha / r`.
        dropout: Dropout before the adapter.
        target_modules: Last parts of module names, or `all-linear` for every linear layer but the output.
        seed: Seed of the adapter's initial weights; the global RNG stays as it was.

    Raises:
        ConfigError: `target_modules` names a module that the model does not have.
    """
    import torch

    peft = require("peft", extra="trainers", needed_by="apply_lora")
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()} - {""}
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    for name in [targets] if isinstance(targets, str) else targets:
        if name != "all-linear" and name.rpartition(".")[2] not in known:
            raise ConfigError(
                f"expected names of modules of the model at `target_modules`, got `{name}`; "
                f"{did_you_mean(name, known)}"
            )
    config = peft.LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft asks transformers for an attribute that transformers has renamed.
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing`", category=FutureWarning
        )
        torch.manual_seed(seed)
        adapted: Any = peft.get_peft_model(model, config)
    return adapted
