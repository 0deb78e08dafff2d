"""The role of an accelerator: the devices of one kind that this process can see."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Accelerator(ABC):
    """One kind of device. A value without state: it asks torch when it is asked."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The user's word, which is torch's device type: cpu, cuda, mps, xpu, hpu, npu."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """The torch.distributed backend that carries its tensors: gloo, nccl, xccl, ..."""

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """Whether any number of processes use the same device, so that `devices` counts processes, not devices."""

    @property
    def is_recorded(self) -> bool:
        """Whether operations are recorded, and run as one graph once a step is marked. Then a strategy marks steps."""
        return False

    @property
    def auto_strategies(self) -> tuple[str, str]:
        """The words that `strategy='auto'` stands for: with one device, and with several."""
        return "single_device", "ddp"

    def platform(self) -> str:
        """Which kind of hardware it drives now, where it can drive several and strategies differ; "" elsewhere."""
        return ""

    @abstractmethod
    def num_devices(self) -> int:
        """How many devices a process can use now; 0 where there are none. Initialises no device."""

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """None where it can be used; otherwise a sentence that says what is missing."""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """The device of an index. The CPU has one device, whatever the index."""

    @abstractmethod
    def connect(self, index: int) -> None:
        """Make device `index` the process's current one. First thing in a rank, before any tensor is made."""
