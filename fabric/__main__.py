"""`python -m fabric` is the command `fabric`."""

import sys

from fabric.cli import main

sys.exit(main())
