"""Environment variables that are set for a while: libraries read them when they start."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

FLIGHT_RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Torch's names for how many calls its flight recorder keeps."""
NUM_CALLS = 256
"""Enough for loops that differ by a step: a call takes about 1 KB."""


@contextmanager
def variables(environ: MutableMapping[str, str], values: Mapping[str, str]) -> Iterator[None]:
    """Context manager: the variables have these values inside, and their former ones after it."""
    before = {name: environ[name] for name in values if name in environ}
    environ.update(values)
    try:
        yield
    finally:
        for name in values:
            environ.pop(name, None)
        environ.update(before)


def default(environ: MutableMapping[str, str], name: str, value: str) -> AbstractContextManager[None]:
    """Context manager: the variable has this value inside, unless it has one already."""
    return nullcontext() if name in environ else variables(environ, {name: value})


def recording(environ: MutableMapping[str, str]) -> AbstractContextManager[None]:
    """Context manager: the first use of torch's flight recorder inside turns it on. A value of the user's is kept.

    On gloo it is off unless the variable is set; on NCCL torch keeps 2000 calls by itself.
    """
    name, of_nccl = FLIGHT_RECORDER_SIZES
    return nullcontext() if of_nccl in environ else default(environ, name, str(NUM_CALLS))
