"""`python -m longstep` is the `longstep` command."""

import sys

from longstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
