"""The ranks of a world along named axes, whose degrees multiply to its size.

Ranks are numbered with the last axis fastest, so that neighbours on it are neighbours in the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_degrees(degrees: Mapping[str, int], size: int, *, written: str) -> None:
    """Raise ValueError where the degrees do not multiply to the number of ranks. `written`: what the user wrote."""
    product = math.prod(degrees.values())
    if product != size or min(degrees.values()) < 1:
        axes = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        raise ValueError(
            f"`{written}` makes a mesh of {axes}: {product} ranks, but there are {size}. "
            f"Write whole numbers from 1 on that multiply to {size}."
        )


def device_mesh(device: torch.device, degrees: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks. Ranks: all call it, after the collective's `setup`."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
