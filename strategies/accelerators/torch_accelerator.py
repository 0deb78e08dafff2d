"""Every device that torch itself can drive: cuda (ROCm too), mps, xpu, and with their packages hpu and npu.

One class serves them all: torch offers `torch.accelerator` for the kind of device it was built for, and
`torch.get_device_module` for a kind by its name. Knows no vendor's library.

Counting devices must not initialise one, because a process that then forks would give its children a broken driver. So
`torch.cuda.is_available`, which may initialise CUDA, is never called here; `torch.cuda.device_count` asks NVML, and
CUDA only where NVML does not answer, as on a machine without a driver: a fork loses nothing there (`fork.py`).
"""

from dataclasses import dataclass
from typing import final

import torch

from fabric.strategies.accelerators.accelerator import Accelerator


def has_streams(device: torch.device) -> bool:
    """Whether torch drives the device, with streams, pinned memory, and random generators by index. On MPS copies and
    computations share one queue."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type != "mps"


@final
@dataclass(frozen=True, slots=True)
class TorchAccelerator(Accelerator):
    """The devices of one torch device type. A value: creating one does not query the machine."""

    device_type: str
    """torch's name: cuda, mps, xpu, hpu, npu."""
    is_shared = False
    """False: each process has devices of its own."""

    @property
    def name(self) -> str:
        """The device type."""
        return self.device_type

    @property
    def backend(self) -> str:
        """The backend that torch.distributed has registered for the device type. Raises: KeyError: there is none."""
        from torch.distributed import Backend

        return Backend.default_device_backend_map[self.device_type]

    def num_devices(self) -> int:
        """How many devices of the type this process sees; 0 if torch does not support the type."""
        if self._built_for() != self.device_type:
            return 0
        return int(torch.get_device_module(self.device_type).device_count())

    def why_unavailable(self) -> str | None:
        """None, or the reason: torch was built for another device, lacks a package, or sees no device."""
        if self.num_devices() > 0:
            return None
        kind, built_for = self.device_type, self._built_for() or "the CPU alone"
        advice = (
            "Check its driver, and the variable that hides devices, such as CUDA_VISIBLE_DEVICES."
            if built_for == kind
            else f"Install a torch for {kind}, or the package that adds it: https://pytorch.org/get-started/locally."
        )
        return f"torch {torch.__version__} is built for {built_for}, and this process sees no {kind} device. {advice}"

    def device(self, index: int) -> torch.device:
        """The device of the type with this index."""
        return torch.device(self.device_type, index)

    def set_device(self, index: int) -> None:
        """Make device `index` the current one, which `torch.device(type)` and collectives use."""
        torch.accelerator.set_device_index(index)

    @staticmethod
    def _built_for() -> str | None:
        """The device type this torch was built for besides the CPU; reads the build, not the devices."""
        current = torch.accelerator.current_accelerator(check_available=False)
        return current.type if current is not None else None
