"""Accelerators by name: those of torch, those a program registered, and those of installed packages."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from fabric.strategies.accelerators.accelerator import Accelerator, CPUAccelerator
from fabric.strategies.accelerators.torch_accelerator import TorchAccelerator
from fabric.strategies.accelerators.xla import XLAAccelerator
from fabric.strategies.registered_names import Registration, Registry
from fabric.strategies.tensors.generator_interface import Rng

_ACCELERATORS: Registry[Accelerator] = Registry(
    "accelerator",
    "fabric.accelerators",
    (
        Registration(name="cpu", make=CPUAccelerator),
        *(
            Registration(name=name, make=partial(TorchAccelerator, name))
            for name in ("cuda", "mps", "xpu", "hpu", "npu")
        ),
        Registration(name="xla", make=XLAAccelerator),
    ),
)
_OTHER_LIBRARIES = {
    "tpu": "`accelerator='tpu'` is `accelerator='xla'` here: TPUs are used through torch_xla. Write 'xla'.",
    "gpu": (
        "`accelerator='gpu'` names several kinds of device. Write 'cuda' for the GPUs of NVIDIA and AMD, 'mps' for "
        "those of Apple, 'xpu' for those of Intel, or 'auto' for what this machine has."
    ),
}
"""Names of other libraries, each with the error that says what to write."""


def accelerators(*, installed: bool = True) -> tuple[Accelerator, ...]:
    """Every accelerator by name, whether or not this machine has it; see `why_unavailable()`.

    `installed=False` leaves out the entry points of installed packages, and their cost.
    """
    return tuple(registration.make() for registration in _ACCELERATORS.all(installed=installed).values())


def available_accelerators() -> tuple[str, ...]:
    """The names that `Fabric(accelerator=...)` can use on this machine now."""
    return tuple(accelerator.name for accelerator in accelerators() if accelerator.why_unavailable() is None)


def make_accelerator(name: str) -> Accelerator:
    """The accelerator of a name.

    Raises: ValueError: the name is unknown; the message has similar names and all names.
    """
    if name in _OTHER_LIBRARIES:
        raise ValueError(_OTHER_LIBRARIES[name])
    return _ACCELERATORS.make(name)


def register_accelerator(name: str, factory: Callable[[], Accelerator]) -> None:
    """Make `Fabric(accelerator=name)` use the result of `factory()`, in this process from now on.

    Raises: ValueError: the name is taken.
    """
    _ACCELERATORS.register(name, factory)


def device_rngs(devices: Iterable[torch.device]) -> list[Rng]:
    """The random generators of devices that are in use, in their order. That of the CPU belongs to the process."""
    return [make_accelerator(device.type).rng(device) for device in devices if device.type != "cpu"]
