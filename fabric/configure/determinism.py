"""Deterministic algorithms, for as long as a fabric is open."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Literal

import torch

from fabric.launchers.environments.defaults import default


@contextmanager
def determinism(wanted: bool | Literal["warn"], environ: MutableMapping[str, str]) -> Iterator[None]:
    """Context: operations are deterministic, or raise (`True`) or warn (`"warn"`). Restores the setting at its end.

    `False` changes nothing. Sets `CUBLAS_WORKSPACE_CONFIG` in `environ`, which cuBLAS needs and reads when it starts.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if wanted is False:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=wanted == "warn")
    torch.backends.cudnn.benchmark = False
    try:
        with default(environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
