"""XLAAccelerator."""

from __future__ import annotations

from typing import final

from fabric.lightning.accelerators.accelerator import Accelerator


@final
class XLAAccelerator(Accelerator):
    """`accelerator="xla"`: TPUs."""

    device_type = "xla"
