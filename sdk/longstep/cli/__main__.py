"""`python -m longstep.cli`, the same as `longstep`."""

import sys

from longstep.cli import main

sys.exit(main())
