"""CUDAAccelerator, and which CUDA devices can be used."""

from __future__ import annotations

from typing import final

from fabric.lightning.accelerators.accelerator import Accelerator


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
