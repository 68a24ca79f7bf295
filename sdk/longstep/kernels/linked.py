"""Kernels made of several functions: numba calls only what it has compiled, and nothing is compiled at import."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from longstep.kernels import Kernel

__all__ = ["LinkedKernel"]

P = ParamSpec("P")
R = TypeVar("R")


class LinkedKernel(Kernel[P, R]):
    """A kernel whose loop calls the loops of other kernels, by their names.

    Args:
        loop: As in `Kernel`; as plain Python it runs with the plain loops.
        signatures: As in `Kernel`.
        uses: The kernels that `loop` calls; they are compiled first.
    """

    def __init__(
        self, loop: Callable[P, R], *signatures: str, uses: tuple[Kernel[..., Any], ...]
    ) -> None:
        super().__init__(loop, *signatures)
        self._uses = uses

    def compile(self) -> Callable[P, R]:
        """The compiled function. Raises `MissingExtraError` when numba is not installed."""
        if self._compiled is None:
            plain = self.loop
            assert isinstance(plain, types.FunctionType)
            compiled = {kernel.loop.__name__: kernel.compile() for kernel in self._uses}
            self.loop = types.FunctionType(plain.__code__, {**plain.__globals__, **compiled})
            try:
                super().compile()
            finally:
                self.loop = plain
        return super().compile()
