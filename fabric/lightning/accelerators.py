"""The kinds of devices, with the names and methods of Lightning Fabric."""

from typing import final

import torch

from fabric.strategies.accelerators.accelerator_registry import make_accelerator


class Accelerator:
    """One kind of device. `isinstance` works on it, and it may be passed to `Fabric(accelerator=...)`."""

    device_type: str = ""
    """The device type of torch, such as "cuda"."""

    @classmethod
    def name(cls) -> str:
        """The name for `Fabric(accelerator=...)`."""
        return cls.device_type

    @classmethod
    def is_available(cls) -> bool:
        """Whether this process can use a device of this kind."""
        return make_accelerator(cls.device_type).why_unavailable() is None

    @classmethod
    def auto_device_count(cls) -> int:
        """The number of devices for `devices="auto"`."""
        return make_accelerator(cls.device_type).num_devices()

    def setup_device(self, device: torch.device) -> None:
        """Does nothing: `launch` sets the current device of a rank."""

    def teardown(self) -> None:
        """Does nothing: `fabric.close()` releases devices."""


@final
class CPUAccelerator(Accelerator):
    """`accelerator="cpu"`: the processor."""

    device_type = "cpu"


@final
class MPSAccelerator(Accelerator):
    """`accelerator="mps"`: Apple's GPUs."""

    device_type = "mps"


@final
class XLAAccelerator(Accelerator):
    """`accelerator="xla"`: TPUs."""

    device_type = "xla"


@final
class CUDAAccelerator(Accelerator):
    """`accelerator="cuda"`: GPUs of NVIDIA and AMD."""

    device_type = "cuda"


def num_cuda_devices() -> int:
    """The number of visible CUDA devices; does not initialise CUDA."""
    return CUDAAccelerator.auto_device_count()


def is_cuda_available() -> bool:
    """Whether there is a visible CUDA device; does not initialise CUDA."""
    return num_cuda_devices() > 0


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """The indices of the first `num_devices` CUDA devices; -1 for all.

    Raises: ValueError: there are fewer.
    """
    found = num_cuda_devices()
    if num_devices > found:
        raise ValueError(
            f"`find_usable_cuda_devices({num_devices})`, but this process sees {found} CUDA devices. Ask for at most "
            f"{found}."
        )
    return list(range(found if num_devices < 0 else num_devices))


def accelerator_of(name: str) -> Accelerator:
    """The accelerator of this name, an instance of Lightning Fabric's class name; of a new class where that library has
    none, such as for xpu."""
    kinds = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator, "xla": XLAAccelerator}
    kind: type[Accelerator] = kinds.get(name) or type(
        f"{name.upper()}Accelerator", (Accelerator,), {"device_type": name}
    )
    return kind()
