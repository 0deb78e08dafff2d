"""MPSAccelerator."""

from __future__ import annotations

from typing import final

from fabric.lightning.accelerators.accelerator import Accelerator


@final
class MPSAccelerator(Accelerator):
    """`accelerator="mps"`: Apple's GPUs."""

    device_type = "mps"
