"""What vLLM leaves to the garbage collector is collected where its warnings do no harm."""

import gc
import sys
import warnings
from collections.abc import Iterator

import pytest


def _collect() -> None:
    """vLLM warns of ZeroMQ contexts of its own that it has not closed, as after a start that failed."""
    if "vllm" in sys.modules:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unclosed context", ResourceWarning)
            gc.collect()


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    _collect()


def pytest_sessionfinish() -> None:
    """After the last fixture has been taken down."""
    _collect()
