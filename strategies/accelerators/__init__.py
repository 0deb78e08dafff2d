"""Accelerators: the kinds of devices, how many a process sees, and how a rank selects one."""

from fabric.strategies.accelerators.accelerator import Accelerator as Accelerator
from fabric.strategies.accelerators.accelerator import CPUAccelerator as CPUAccelerator
from fabric.strategies.accelerators.accelerator_registry import accelerators as accelerators
from fabric.strategies.accelerators.accelerator_registry import available_accelerators as available_accelerators
from fabric.strategies.accelerators.accelerator_registry import make_accelerator as make_accelerator
from fabric.strategies.accelerators.accelerator_registry import register_accelerator as register_accelerator
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator as TorchAccelerator
from fabric.strategies.accelerators.xla import XLAAccelerator as XLAAccelerator
