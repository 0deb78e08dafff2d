"""What a rank takes over from the process that launched it.

A forked rank starts with everything its parent had. A rank from a fork server or a fresh interpreter starts with
nothing; this value brings over what a reader of the script would expect to be there: the environment, the folder, the
import path, the arguments, and the states of the random generators.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """Taken in the launching process, given in the rank."""

    environ: dict[str, str]
    folder: str
    path: list[str]
    argv: list[str]
    python_random: Any
    numpy_random: Any | None
    torch_random: bytes | None

    @classmethod
    def take(cls) -> Inheritance:
        """What this process would hand down now."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        return cls(
            environ=dict(os.environ),
            folder=os.getcwd(),
            # "" means the folder the process is in, which the rank may leave before it imports.
            path=[entry or os.getcwd() for entry in sys.path],
            argv=list(sys.argv),
            python_random=random.getstate(),
            numpy_random=numpy.random.get_state() if numpy is not None else None,
            torch_random=bytes(torch.get_rng_state().numpy()) if torch is not None else None,
        )

    def give_surroundings(self) -> None:
        """First thing in the rank, before anything of the user's is imported."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        sys.path[:] = self.path
        sys.argv[:] = self.argv

    def give_randomness(self) -> None:
        """After the user's modules are there: an import that draws a random number changes nothing."""
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            import numpy

            numpy.random.set_state(self.numpy_random)
        if self.torch_random is not None:
            import torch

            torch.set_rng_state(torch.frombuffer(bytearray(self.torch_random), dtype=torch.uint8))
