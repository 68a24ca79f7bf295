"""Engines by name: what an actor is told to serve. Each runtime is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstep.errors import ConfigError, LongstepError, did_you_mean, require

if TYPE_CHECKING:
    from longstep_bindings.engines.served import ServedEngine

__all__ = ["ENGINES", "open_engine"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def open_engine(kind: str, model_path: str | Path, **options: Any) -> ServedEngine:
    """The engine `kind` with the model at `model_path`, ready to serve.

    Args:
        kind: `transformers`, `vllm`, `openai`, or `module:function` of what makes one out of a path and options.
        model_path: A model folder in Hugging Face form; for `openai` the address of the server.
        options: What the engine takes beside the model.

    Raises:
        ConfigError: There is no such engine or option, or the model cannot be loaded.
        MissingExtraError: The runtime is not installed.
    """
    opener = ENGINES.get(kind) or _named(kind)
    try:
        return opener(model_path, options)
    except LongstepError:
        raise
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigError(f"expected options of the engine `{kind}`, got {error}") from None


def _named(kind: str) -> Callable[[str | Path, Mapping[str, Any]], ServedEngine]:
    module, colon, attribute = kind.partition(":")
    if not colon:
        raise ConfigError(
            f"expected an engine, got `{kind}`; {did_you_mean(kind, ENGINES)}, or `module:function`"
        )
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"expected `module:function` of an engine, got `{kind}`: {error}"
        ) from None
    return lambda model_path, options: make(model_path, **options)


def _open_transformers(model_path: str | Path, options: Mapping[str, Any]) -> ServedEngine:
    torch = require("torch", extra="trainers", needed_by='engine "transformers"')
    transformers = require("transformers", extra="trainers", needed_by='engine "transformers"')
    from longstep_bindings.engines.batched import BatchedEngine
    from longstep_bindings.engines.transformers_engine import TransformersEngine

    engine_options = dict(options)
    batching = {
        name: engine_options.pop(name)
        for name in ("max_batch", "max_adapter_rank", "gather_s")
        if name in engine_options
    }
    dtype = engine_options.pop("dtype", "auto")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"expected a number format as `dtype`, got {dtype!r}; {did_you_mean(str(dtype), _DTYPES)}"
        )
    device = engine_options.pop("device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer, processor = _load(transformers, model_path, dtype)
    model.requires_grad_(False)
    if processor is not None:
        engine_options["processor"] = processor
    engine = TransformersEngine(model.eval(), tokenizer, device=device, **engine_options)
    return BatchedEngine(
        engine, model_name=str(model_path), takes_images=processor is not None, **batching
    )


def _load(transformers: Any, model_path: str | Path, dtype: str) -> tuple[Any, Any, Any]:
    """The model at `model_path` with its tokenizer and, if it reads images, its processor."""
    try:
        config = transformers.AutoConfig.from_pretrained(model_path)
        sees = hasattr(config, "vision_config")
        loader = (
            transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        )
        model, report = loader.from_pretrained(model_path, dtype=dtype, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    except Exception as error:  # whatever a broken folder makes transformers raise
        raise ConfigError(
            f"expected a causal language model in Hugging Face form at `{model_path}`, but loading failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"expected weights for every parameter at `{model_path}`, got none for {len(missing)}, such as "
            f"`{missing[0]}`; the file is incomplete or of another architecture than `config.json` says"
        )
    if not sees:
        return model, tokenizer, None
    from longstep_bindings.engines.image_prompts import load_processor

    return model, tokenizer, load_processor(model_path, tokenizer)


def _open_vllm(model_path: str | Path, options: Mapping[str, Any]) -> ServedEngine:
    from longstep_bindings.engines.vllm_engine import VLLMEngine

    return VLLMEngine(model_path, **options)


def _open_openai(base_url: str | Path, options: Mapping[str, Any]) -> ServedEngine:
    from longstep_bindings.engines.openai_engine import OpenAIEngine

    return OpenAIEngine(str(base_url), **options)


ENGINES: Mapping[str, Callable[[str | Path, Mapping[str, Any]], ServedEngine]] = {
    "transformers": _open_transformers,
    "vllm": _open_vllm,
    "openai": _open_openai,
}
"""What opens an engine, by its name."""
