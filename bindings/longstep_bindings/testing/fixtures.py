"""The fault kit as pytest fixtures; import them in `conftest.py`. Everything is closed when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from longstep_bindings.testing.line import FaultyLine
from longstep_bindings.testing.rig import FaultRig

__all__ = ["fault_rig", "faulty_line"]


@pytest.fixture
def fault_rig() -> Iterator[Callable[..., FaultRig]]:
    """Makes a `FaultRig`, with its arguments."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(FaultRig(*args, **kwargs))


@pytest.fixture
def faulty_line() -> Iterator[Callable[..., FaultyLine]]:
    """Makes a `FaultyLine`, with its arguments."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(FaultyLine(*args, **kwargs))
