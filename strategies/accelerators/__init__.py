"""Accelerators: the kinds of devices, how many a process sees, and how a rank selects one."""

from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.accelerators.cpu import CPUAccelerator
from fabric.strategies.accelerators.registry import (
    accelerators,
    available_accelerators,
    make_accelerator,
    register_accelerator,
)
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.accelerators.xla import XLAAccelerator

__all__ = [
    "Accelerator",
    "CPUAccelerator",
    "TorchAccelerator",
    "XLAAccelerator",
    "accelerators",
    "available_accelerators",
    "make_accelerator",
    "register_accelerator",
]
