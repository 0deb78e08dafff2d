"""A kind of device, as code for Lightning Fabric asks about it."""

from __future__ import annotations

import torch

from fabric.strategies.accelerators.registry import make_accelerator


class Accelerator:
    """One kind of device. `isinstance` works on it, and it may be passed to `Fabric(accelerator=...)`."""

    device_type: str = ""
    """torch's word."""

    @classmethod
    def name(cls) -> str:
        """The word for `Fabric(accelerator=...)`."""
        return cls.device_type

    @classmethod
    def is_available(cls) -> bool:
        """Whether this process can use one."""
        return make_accelerator(cls.device_type).why_unavailable() is None

    @classmethod
    def auto_device_count(cls) -> int:
        """How many there are for `devices="auto"`."""
        return make_accelerator(cls.device_type).num_devices()

    def setup_device(self, device: torch.device) -> None:
        """Nothing: the device of a rank is made its current one when it is launched."""

    def teardown(self) -> None:
        """Nothing: `fabric.close()` gives back what was taken."""


def view_of(name: str) -> Accelerator:
    """An accelerator that Lightning Fabric has no class for, such as xpu."""
    kind: type[Accelerator] = type(f"{name.upper()}Accelerator", (Accelerator,), {"device_type": name})
    return kind()
