"""Compiled loops for the hot paths, each with a numpy twin.

A kernel is a plain Python loop wrapped in `Kernel`, beside a numpy function that gives the same result. numba is
optional and never imported by accident: until `warm_up` was called, every function of this package runs its numpy twin,
so no compilation ever happens inside a training step. Machine code is cached on disk.

>>> from longstep import kernels
>>> kernels.backend()
'numpy'
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["Kernel", "backend", "numpy_only", "warm_up"]

P = ParamSpec("P")
R = TypeVar("R")

_MODULES = (
    "longstep.kernels.segments",
    "longstep.kernels.partition",
    "longstep.kernels.hashing",
    "longstep.kernels.similarity",
)
_lock = threading.Lock()
_warm = False
_numpy_only = 0


class Kernel(Generic[P, R]):
    """A loop that numba compiles when it is first called, or by `compile`.

    Modules of this package list theirs in a tuple `KERNELS`, which `warm_up` walks.

    Args:
        loop: A module-level function in the subset of Python that numba compiles.
        signatures: numba signatures such as `"float64[::1](float32[::1], int64[::1], float64)"`; compiled ahead, so
            that no call ever meets a type that was not.
    """

    def __init__(self, loop: Callable[P, R], *signatures: str) -> None:
        self.loop = loop
        self.signatures = signatures
        self._compiled: Callable[P, R] | None = None

    def compile(self) -> Callable[P, R]:
        """The compiled function. Raises `MissingExtraError` when numba is not installed."""
        if self._compiled is None:
            from longstep.errors import require

            numba = require("numba", extra="fast", needed_by="longstep.kernels")
            signatures = list(self.signatures)
            try:
                jit: Any = numba.njit(signatures, cache=True, nogil=True)(self.loop)
            except RuntimeError:  # no folder that the machine code may be cached in
                jit = numba.njit(signatures, nogil=True)(self.loop)
            self._compiled = cast("Callable[P, R]", jit)
        return self._compiled

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the compiled loop."""
        call: Callable[..., R] = self._compiled or self.compile()
        return call(*map(_writable, args), **kwargs)


def _writable(value: Any) -> Any:
    """`value`; an array that is read-only, such as a view of bytes, as a copy: numba takes it for another type."""
    if isinstance(value, np.ndarray):
        array = cast(NDArray[Any], value)
        return array if array.flags.writeable else array.copy()
    return value


def backend() -> str:
    """`numba` once `warm_up` has finished, otherwise `numpy`: what the functions of this package run."""
    return "numba" if _warm and not _numpy_only else "numpy"


def warm_up() -> bool:
    """Compile every kernel, or load it from the disk cache, and use them from now on.

    Call it once where waiting costs nothing, such as while the first rollouts run; it may be called from a thread
    of its own. The first time on a machine takes some seconds, later under one.

    Returns:
        True when the kernels are in use; False when numba is not installed, and numpy serves.
    """
    global _warm
    with _lock:
        if not _warm and importlib.util.find_spec("numba") is not None:
            for name in _MODULES:
                if importlib.util.find_spec(name) is not None:
                    for kernel in importlib.import_module(name).KERNELS:
                        kernel.compile()
            _warm = True
        return _warm


@contextmanager
def numpy_only() -> Generator[None]:
    """Within the block every function runs its numpy twin, in all threads: for comparisons and to isolate a fault."""
    global _numpy_only
    _numpy_only += 1
    try:
        yield
    finally:
        _numpy_only -= 1
