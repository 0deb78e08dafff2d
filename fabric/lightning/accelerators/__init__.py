"""The kinds of devices, under the names of Lightning Fabric."""

from __future__ import annotations

from fabric.lightning.accelerators.accelerator import Accelerator, CPUAccelerator, MPSAccelerator, XLAAccelerator
from fabric.lightning.accelerators.cuda import CUDAAccelerator, find_usable_cuda_devices

__all__ = [
    "Accelerator",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "accelerator_of",
    "find_usable_cuda_devices",
]


def accelerator_of(name: str) -> Accelerator:
    """The accelerator of this name, an instance of Lightning Fabric's class name; of a new class where that library has
    none, such as for xpu."""
    kinds = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator, "xla": XLAAccelerator}
    kind: type[Accelerator] = kinds.get(name) or type(
        f"{name.upper()}Accelerator", (Accelerator,), {"device_type": name}
    )
    return kind()
