"""Deterministic algorithms, for as long as a fabric is open."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def determinism(wanted: bool | Literal["warn"]) -> Iterator[None]:
    """Context: operations are deterministic, or raise (`True`) or warn (`"warn"`). Restores the setting at its end.

    `False` changes nothing. Sets `CUBLAS_WORKSPACE_CONFIG`, which cuBLAS needs and reads when it starts.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if wanted is False:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.use_deterministic_algorithms(True, warn_only=wanted == "warn")
    torch.backends.cudnn.benchmark = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
