"""Makes `rpc_service`, which also runs as a process of its own, importable from the tests beside it; and what all tests of the bindings share."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
