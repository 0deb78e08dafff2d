"""Devices that torch_xla drives through PJRT: TPUs, and the processor as one or several devices of XLA.

PJRT_DEVICE says which, and nothing is guessed: torch_xla by itself takes the processor where it finds no TPU. Counting
imports torch_xla for a TPU alone, and touches no device: whoever did could launch no replicas afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

import torch

from fabric.launchers.environments.xla import PJRT
from fabric.strategies.accelerators.accelerator import Accelerator


@final
@dataclass(frozen=True, slots=True)
class XLAAccelerator(Accelerator):
    """What `torch.device('xla')` stands for."""

    @property
    def name(self) -> str:
        """`xla`."""
        return "xla"

    @property
    def backend(self) -> str:
        """`xla`, which torch_xla registers. No strategy of ours uses it: its barrier and its averages do nothing."""
        return "xla"

    @property
    def is_shared(self) -> bool:
        """False: PJRT gives each replica a device of its own."""
        return False

    @property
    def is_recorded(self) -> bool:
        """True: nothing runs before a step is marked, or a value is read."""
        return True

    @property
    def auto_strategies(self) -> tuple[str, str]:
        """A replica for each device, where there are several."""
        return "single_xla", "xla"

    def num_devices(self) -> int:
        """How many devices PJRT has on this node; 0 where it has none."""
        if self.why_unavailable() is not None:
            return 0
        return _num_tpu_devices() if PJRT.of().client == "TPU" else PJRT.of().num_cpu_devices

    def platform(self) -> str:
        """PJRT's client: TPU or CPU."""
        return PJRT.of().client or ""

    def why_unavailable(self) -> str | None:
        """None, or whether torch_xla is missing, PJRT was not told of a device, or sees no TPU."""
        if find_spec("torch_xla") is None:
            return "torch-xla is not installed. `pip install 'torchfabric[xla]'` adds it, for the torch of its number."
        client = PJRT.of().client
        if client == "CPU":
            return None
        if client != "TPU":
            said = "is not set" if client is None else f"is {client!r}"
            return f"PJRT_DEVICE {said}. Set `PJRT_DEVICE=TPU`, or `PJRT_DEVICE=CPU` to run XLA on the processor."
        return None if _num_tpu_devices() else "PJRT_DEVICE=TPU, but this machine has no TPU."

    def device(self, index: int) -> torch.device:
        """The device with this index in its process."""
        return torch.device("xla", index)

    def connect(self, index: int) -> None:
        """Make device `index` the current one of this thread."""
        import torch_xla

        torch_xla.device(index)


def _num_tpu_devices() -> int:
    from fabric.launchers.xla_internals import num_tpu_devices

    return num_tpu_devices()
