"""Tests over Horovod, in the environment of `make test-horovod`; anywhere else they are not collected."""

from __future__ import annotations

import os
from importlib.util import find_spec

# By default, Horovod looks for messages a thousand times a second: a quarter of the time of ranks that share two cores.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "4")

if find_spec("horovod") is None:
    collect_ignore_glob = ["test_*.py"]
