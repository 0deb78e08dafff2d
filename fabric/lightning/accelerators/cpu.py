"""CPUAccelerator."""

from __future__ import annotations

from typing import final

from fabric.lightning.accelerators.accelerator import Accelerator


@final
class CPUAccelerator(Accelerator):
    """`accelerator="cpu"`: the processor."""

    device_type = "cpu"
