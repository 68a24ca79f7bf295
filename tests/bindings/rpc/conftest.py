"""Makes `rpc_service`, which also runs as a process of its own, importable from the tests beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
