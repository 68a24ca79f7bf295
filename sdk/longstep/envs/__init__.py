"""Built-in environments: plain Gymnasium environments in numpy, seeded per instance.

`KeyDoorEnv` is a text world that a tiny model learns in minutes; `SokobanEnv` is the classic puzzle, as text or as
images. Names load what they need when first used.
"""

# lazy_loader has no type stubs; type checkers follow __init__.pyi.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
