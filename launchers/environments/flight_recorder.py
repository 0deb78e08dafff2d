"""Turns torch's flight recorder on, by the environment variable that it reads when it is first used.

On gloo it is off unless the variable is set; on NCCL torch keeps 2000 calls by itself.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext

from fabric.launchers.environments.defaults import default

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Torch's names for how many calls are kept."""
NUM_CALLS = 256
"""Enough for loops that differ by a step: a call takes about 1 KB."""


def recording(environ: MutableMapping[str, str]) -> AbstractContextManager[None]:
    """Context manager: the first use of the flight recorder inside turns it on. A value set by the user is kept."""
    return nullcontext() if SIZES[1] in environ else default(environ, SIZES[0], str(NUM_CALLS))
