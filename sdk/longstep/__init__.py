"""longstep: environments, memory, prompts and step-level credit for LLM agents over tens to hundreds of steps.

Importing this package loads neither torch, numba, zmq nor gymnasium; names load what they need when first used.
"""

import lazy_loader as _lazy  # pyright: ignore[reportMissingTypeStubs]

from longstep._version import __version__ as __version__

__getattr__, __dir__, __all__ = _lazy.attach_stub(  # pyright: ignore[reportUnknownVariableType]
    __name__, __file__
)
