"""Makes `worker_envs`, which workers import too, importable from the tests beside it; and what all tests of the bindings share."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
