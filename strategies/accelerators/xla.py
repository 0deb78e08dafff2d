"""Devices that torch_xla drives through PJRT: TPUs, and the CPU as one or several XLA devices.

PJRT_DEVICE selects the kind; torch_xla's own default, the CPU if there is no TPU, is not used. Counting imports
torch_xla for a TPU only, and initialises no device: otherwise no replicas could be launched afterwards.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

import torch

from fabric.launchers.environments.xla import PJRT
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.tensors.generator_interface import Rng


@final
@dataclass(frozen=True, slots=True)
class XLAAccelerator(Accelerator):
    """The devices of `torch.device('xla')`."""

    name = "xla"
    backend = "xla"
    """`xla`, which torch_xla registers. Our strategies do not use it: its barrier and its averages do nothing."""
    is_shared = False
    """False: PJRT gives each replica a device of its own."""
    is_recorded = True
    """True: operations run when a step is marked, or a value is read."""
    auto_strategies = "single_xla", "xla"
    """With several devices, a replica for each."""
    why_no_sync_batch_norm = (
        "Torch's has no messages over XLA, and each replica would use the statistics of its own share. Write "
        "`nn.BatchNorm2d` (or 1d, 3d) for that, or `strategy='xla_fsdp'`, where BatchNorm's statistics are those of "
        "the whole batch."
    )
    """Under `xla_fsdp` there is one rank."""

    def num_devices(self) -> int:
        """How many devices PJRT has on this node; 0 if none."""
        if self.why_unavailable() is not None:
            return 0
        return _num_tpu_devices() if PJRT.of().client == "TPU" else PJRT.of().num_cpu_devices

    def platform(self) -> str:
        """PJRT's platform: TPU or CPU."""
        return PJRT.of().client or ""

    def why_unavailable(self) -> str | None:
        """None, or the reason: torch_xla is missing, PJRT_DEVICE is not set, or there is no TPU."""
        if find_spec("torch_xla") is None:
            return "torch-xla is not installed. `pip install 'torchfabric[xla]'` adds it, for the torch of its number."
        client = PJRT.of().client
        if client == "CPU":
            return None
        if client != "TPU":
            setting = "is not set" if client is None else f"is {client!r}"
            return f"PJRT_DEVICE {setting}. Set `PJRT_DEVICE=TPU`, or `PJRT_DEVICE=CPU` to run XLA on the processor."
        return None if _num_tpu_devices() else "PJRT_DEVICE=TPU, but this machine has no TPU."

    def device(self, index: int) -> torch.device:
        """The device with this index in its process."""
        return torch.device("xla", index)

    def set_device(self, index: int) -> None:
        """Make device `index` the current one of this thread."""
        import torch_xla

        torch_xla.device(index)

    def seed(self) -> None:
        """Seed this rank's device. Does nothing before it is used: to seed it would initialise it, and `connect` seeds
        it."""
        if "torch_xla" not in sys.modules:
            return
        import torch_xla

        from fabric.launchers.xla_internals import runtime_is_initialized

        if runtime_is_initialized():
            torch_xla.manual_seed(torch.initial_seed() % 2**63)

    def rng(self, device: torch.device) -> Rng:
        """The random generator of this rank's device."""
        import torch_xla
        import torch_xla.core.xla_model

        model = torch_xla.core.xla_model
        return Rng(model.get_rng_state, model.set_rng_state, torch_xla.manual_seed)


def _num_tpu_devices() -> int:
    from fabric.launchers.xla_internals import num_tpu_devices

    return num_tpu_devices()
