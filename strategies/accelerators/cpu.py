"""The CPU: one device, whatever the index, shared by all processes.

Always available. There are no indices to choose from: `devices` on the CPU is a number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from fabric.strategies.accelerators.accelerator import Accelerator


@final
@dataclass(frozen=True, slots=True)
class CPUAccelerator(Accelerator):
    """torch's default device."""

    name = "cpu"
    backend = "gloo"
    """`gloo`, which every build of torch.distributed has."""
    is_shared = True
    """True: each process has the whole CPU for its device."""

    def num_devices(self) -> int:
        """One: `devices=4` is four processes on the same device."""
        return 1

    def why_unavailable(self) -> None:
        """None: it is always available."""
        return

    def device(self, index: int) -> torch.device:
        """`cpu`, without an index, so that tensors of all ranks compare equal in their device."""
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Do nothing: a process has no current CPU."""
