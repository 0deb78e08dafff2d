"""The interface of an accelerator, the devices of one kind that this process can see; and the CPU, always available."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch

from fabric.strategies.tensors.generator_interface import Rng


class Accelerator(ABC):
    """One kind of device. Stateless: each method asks torch."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that the user writes, which is torch's device type: cpu, cuda, mps, xpu, hpu, npu."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """The torch.distributed backend for its tensors: gloo, nccl, xccl, ..."""

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """Whether all processes share one device, so that `devices` counts processes."""

    @property
    def is_recorded(self) -> bool:
        """Whether operations are recorded, and run as one graph when a step is marked. Strategies must mark steps."""
        return False

    @property
    def auto_strategies(self) -> tuple[str, str]:
        """The strategies that `strategy='auto'` chooses: with one device, and with several."""
        return "single_device", "ddp"

    @property
    def why_no_sync_batch_norm(self) -> str | None:
        """None if torch's `SyncBatchNorm` works over several ranks; otherwise why not, and what to write."""
        return None

    def platform(self) -> str:
        """The hardware in use, if there are several kinds and strategies differ between them; otherwise ""."""
        return ""

    @abstractmethod
    def num_devices(self) -> int:
        """How many devices a process can use now, or 0. Initialises no device."""

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """None if it can be used; otherwise a sentence that says what is missing."""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """The device with this index. The CPU has one device, whatever the index."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device `index` the current one. Called first in a rank, before any tensor is created."""

    def seed(self) -> None:  # noqa: B027  # most have nothing to add
        """Seed the devices that this process uses with the seed of torch's CPU generator. Does nothing where
        `torch.manual_seed` has done so."""

    def rng(self, device: torch.device) -> Rng:
        """The random generator of a device that is in use."""
        module = torch.get_device_module(device)
        if device.type == "mps":  # one device; its functions take no index
            return Rng(module.get_rng_state, module.set_rng_state, module.manual_seed)
        return Rng(
            read=lambda: module.get_rng_state(device.index),
            write=lambda state: module.set_rng_state(state, device.index),
            seed=module.manual_seed_all,
        )


@final
@dataclass(frozen=True, slots=True)
class CPUAccelerator(Accelerator):
    """The CPU: one device, whatever the index, shared by all processes. `devices` is a number of processes."""

    name = "cpu"
    why_no_sync_batch_norm = (
        "Torch's synchronise GPUs alone, not CPUs. Write `if fabric.device.type != 'cpu': model = "
        "nn.SyncBatchNorm.convert_sync_batchnorm(model)`: the names of weights are the same without it."
    )
    """See `fabric.setup`."""
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
