"""A kind of device, with the methods of Lightning Fabric's `Accelerator`."""

from __future__ import annotations

from typing import final

import torch

from fabric.strategies.accelerators.registry import make_accelerator


class Accelerator:
    """One kind of device. `isinstance` works on it, and it may be passed to `Fabric(accelerator=...)`."""

    device_type: str = ""
    """The device type of torch, such as "cuda"."""

    @classmethod
    def name(cls) -> str:
        """The name for `Fabric(accelerator=...)`."""
        return cls.device_type

    @classmethod
    def is_available(cls) -> bool:
        """Whether this process can use a device of this kind."""
        return make_accelerator(cls.device_type).why_unavailable() is None

    @classmethod
    def auto_device_count(cls) -> int:
        """The number of devices for `devices="auto"`."""
        return make_accelerator(cls.device_type).num_devices()

    def setup_device(self, device: torch.device) -> None:
        """Does nothing: `launch` sets the current device of a rank."""

    def teardown(self) -> None:
        """Does nothing: `fabric.close()` releases devices."""


@final
class CPUAccelerator(Accelerator):
    """`accelerator="cpu"`: the processor."""

    device_type = "cpu"


@final
class MPSAccelerator(Accelerator):
    """`accelerator="mps"`: Apple's GPUs."""

    device_type = "mps"


@final
class XLAAccelerator(Accelerator):
    """`accelerator="xla"`: TPUs."""

    device_type = "xla"
