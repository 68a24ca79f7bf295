"""Opening vLLM: settings, environment variables, and in one sentence why it did not start.

vLLM is told by environment variables too. They are set while it starts, so that its engine process inherits them, and
put back after. The engine's sockets and files go into a private folder, removed with the engine, or by the reaper
(`launch`) when everything is killed at once.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longstep.errors import ConfigError, LongstepError, require
from longstep_bindings.engines.vllm_requests import PARENT_VARIABLE
from longstep_bindings.transport import private_ipc_address

__all__ = ["check_model", "engine_settings", "open_llm", "startup_folder"]

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_EXTENSION = "longstep_bindings.engines.vllm_core.WorkerExtension"
_SAMPLER = "longstep_bindings.engines.vllm_core:LongstepSampler"
_CPU_KV_CACHE_GIB = 1.0
_CPU_BLOCK_SIZE = 32
_RECORD = "\x1e"
_MAX_REASON = 1000


def check_model(model_path: str | Path) -> None:
    """Raise `ConfigError` unless `model_path` may be a model: a folder with a config, or a name on the Hub."""
    path = Path(model_path)
    if path.is_dir() and (path / "config.json").is_file():
        return
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(model_path)):
        return
    what = "a folder without `config.json`" if path.is_dir() else "no such folder"
    raise ConfigError(f"expected a model folder in Hugging Face form at `{model_path}`, got {what}")


def engine_settings(
    model_path: str | Path,
    *,
    dtype: str,
    max_length: int | None,
    max_num_seqs: int | None,
    max_adapter_rank: int,
    kv_cache_gib: float | None,
    gpu_memory_utilization: float | None,
    tensor_parallel_size: int,
    enforce_eager: bool | None,
    weight_transfer: str | None,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`; see `VLLMEngine` for what they mean.

    Raises:
        ConfigError: A value is out of range, or `others` names what is set here.
    """
    is_cpu = _is_cpu()
    if max_adapter_rank > _RANKS[-1] or max_adapter_rank < 0:
        raise ConfigError(
            f"expected `max_adapter_rank` of 0 (no adapters) to {_RANKS[-1]}, got {max_adapter_rank}"
        )
    settings: dict[str, Any] = {
        "model": str(model_path),
        "dtype": _cpu_dtype() if dtype == "auto" and is_cpu else dtype,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [_SAMPLER],
        "worker_extension_cls": _EXTENSION,
        "async_scheduling": False,  # the sampler reads the tokens of the step before
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "tensor_parallel_size": tensor_parallel_size,
        "enforce_eager": is_cpu if enforce_eager is None else enforce_eager,
    }
    if is_cpu:
        gib = _CPU_KV_CACHE_GIB if kv_cache_gib is None else kv_cache_gib
        settings["kv_cache_memory_bytes"] = int(gib * (1 << 30))
    elif kv_cache_gib is not None:
        settings["kv_cache_memory_bytes"] = int(kv_cache_gib * (1 << 30))
    if max_adapter_rank:
        rank = next(rank for rank in _RANKS if rank >= max_adapter_rank)
        settings |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    optional = {
        "max_model_len": max_length,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "weight_transfer_config": weight_transfer and {"backend": weight_transfer},
    }
    settings |= {name: value for name, value in optional.items() if value is not None}
    taken = sorted(settings.keys() & others.keys())
    if taken:
        raise ConfigError(
            f"expected `engine_args` beside what the engine sets itself, got `{taken[0]}`"
        )
    # On a CPU vLLM caches beginnings in blocks of 128 tokens, which is longer than many prompts of agents.
    defaults = {"block_size": _CPU_BLOCK_SIZE} if is_cpu else {}
    return {**defaults, **settings, **others}


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _cpu_dtype() -> str:
    """`float32` where the processor has no bfloat16 arithmetic: there it is several times as fast."""
    import torch

    can = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "auto" if any(map(can.get, ("avx512_bf16", "amx_bf16", "bf16"))) else "float32"


@contextmanager
def startup_folder() -> Iterator[Path]:
    """A private folder for an engine's sockets and files; removed when the block raises."""
    folder = Path(private_ipc_address().removeprefix("ipc://")).parent
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def open_llm(settings: Mapping[str, Any], folder: Path, *, num_threads: int | None) -> Any:
    """A started `AsyncLLM`, in the running event loop.

    Args:
        settings: Of `engine_settings`.
        folder: Of `startup_folder`.
        num_threads: Threads that compute, on a CPU; None leaves it to `OMP_NUM_THREADS`, or takes all cores.

    Raises:
        ConfigError: vLLM did not start, and why.
    """
    require("vllm", extra="vllm", needed_by='engine "vllm"')
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tempfile.gettempdir()  # settled before TMPDIR is changed for the engine process
    log = folder / "errors.log"
    with _environment(_variables(settings, folder, log, num_threads)):
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        except LongstepError:
            raise
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ConfigError(f"expected `engine_args` that vLLM knows, got {error}") from None
        except Exception as error:  # vLLM raises many kinds, pydantic's among them
            raise ConfigError(
                f"expected a model that vLLM can serve at `{settings['model']}`, but starting it failed: "
                f"{_reason(error, log)}"
            ) from error


def _variables(
    settings: Mapping[str, Any], folder: Path, log: Path, num_threads: int | None
) -> dict[str, str]:
    variables = {
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),
        PARENT_VARIABLE: str(os.getpid()),
        # The other runner takes logits processors of another form.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Said at the end of this process about locks of the engine process, which is killed.
        "PYTHONWARNINGS": _join(os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"),
    }
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if _is_cpu():
        # One process instead of two that wait for each other with busy loops.
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if settings.get("enforce_eager"):
            variables |= {"TORCHDYNAMO_DISABLE": "1"}
    if num_threads is not None:
        variables |= {"OMP_NUM_THREADS": str(num_threads)}
    if Path(settings["model"]).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1"}  # nothing is missing that the Hub could give
    variables |= {name: value for name, value in defaults.items() if name not in os.environ}
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        with _environment(variables):
            variables["VLLM_LOGGING_CONFIG_PATH"] = _write_logging(folder, log)
    return variables


def _join(*parts: str | None) -> str:
    return ",".join(filter(None, parts))


def _write_logging(folder: Path, log: Path) -> str:
    """Logging as vLLM has it, with the errors in a file too: its engine process tells its reasons only there."""
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    config = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    config["handlers"]["vllm"]["level"] = config["loggers"]["vllm"]["level"] = level
    config["formatters"]["longstep"] = {"format": f"{_RECORD}%(message)s"}
    config["handlers"]["longstep"] = {
        "class": "logging.FileHandler",
        "level": "ERROR",
        "formatter": "longstep",
        "filename": str(log),
        "delay": True,
    }
    config["loggers"]["vllm"]["handlers"] = [*config["loggers"]["vllm"]["handlers"], "longstep"]
    path = folder / "logging.json"
    path.write_text(json.dumps(config))
    return str(path)


def _reason(error: Exception, log: Path) -> str:
    """The first error of the engine process, or else this one."""
    records = log.read_text(errors="replace").split(_RECORD) if log.exists() else []
    for record in records:
        raised = re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b.*$", record, flags=re.MULTILINE)
        if raised:
            return _one_line(raised[-1])
    return _one_line(f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
