"""State of the launching process that is restored in a rank.

A forked rank has all state of its parent. A rank from a fork server or a new interpreter has none; this value holds
what a reader of the script expects there: the environment, the working directory, the import path, the arguments, and
the states of the random generators.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """Created in the launching process, restored in the rank."""

    environ: dict[str, str]
    folder: str
    path: list[str]
    argv: list[str]
    python_random: Any
    numpy_random: Any | None
    torch_random: bytes | None

    @classmethod
    def take(cls) -> Inheritance:
        """The present state of this process."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        return cls(
            environ=dict(os.environ),
            folder=os.getcwd(),
            # "" means the working directory, which the rank may change before it imports.
            path=[entry or os.getcwd() for entry in sys.path],
            argv=list(sys.argv),
            python_random=random.getstate(),
            numpy_random=numpy.random.get_state() if numpy is not None else None,
            torch_random=bytes(torch.get_rng_state().tolist()) if torch is not None else None,
        )

    def give_surroundings(self) -> None:
        """Called first in the rank, before the user's modules are imported."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        sys.path[:] = self.path
        sys.argv[:] = self.argv

    def give_randomness(self) -> None:
        """Called after the user's modules are imported, so that random numbers drawn by an import change nothing."""
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            import numpy

            numpy.random.set_state(self.numpy_random)
        if self.torch_random is not None:
            import torch

            torch.set_rng_state(torch.frombuffer(bytearray(self.torch_random), dtype=torch.uint8))
