"""Have torch note the last collectives of a process, by a variable that its flight recorder reads when first used.

On gloo it is off unless the variable is set; on NCCL torch keeps 2000 calls by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Torch's names for how many calls are kept."""
NUM_CALLS = 256
"""Enough to see where ranks part whose loops differ by a step: a call takes about 1 KB."""


@contextlib.contextmanager
def recording(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Within it, whoever is the first to use the flight recorder turns it on. What the user has set stays."""
    if any(name in environ for name in SIZES):
        yield
        return
    environ[SIZES[0]] = str(NUM_CALLS)
    try:
        yield
    finally:
        environ.pop(SIZES[0], None)
