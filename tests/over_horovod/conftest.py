"""Tests over Horovod, in the environment of `make test-horovod`; anywhere else they are not collected."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Horovod looks for messages a thousand times a second by default: in ranks that share two cores, a quarter of their time.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "4")

if find_spec("horovod") is None:
    collect_ignore_glob = ["test_*.py"]
