"""The number of CPU cores."""

from __future__ import annotations

import os
from collections.abc import Callable


def num_cores() -> int:
    """The number of cores that this process may use."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
