"""The ranks of a world along named axes, whose degrees multiply to its size.

Ranks are numbered with the last axis fastest, so that neighbours on it are neighbours in the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from fabric.strategies.collectives.collective import Collective

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


def degree(mesh: DeviceMesh, axis: str) -> int:
    """How many ranks there are along an axis."""
    assert mesh.mesh_dim_names is not None
    return mesh.size(mesh.mesh_dim_names.index(axis))


def along(collective: Collective, mesh: DeviceMesh, axes: Sequence[str]) -> Collective:
    """The collective of the ranks that differ from this one along `axes` alone.

    Ranks: all of the mesh, which is that of `collective`, with the same `axes`.
    """
    groups = _groups(mesh, axes)
    if len(groups) == 1:
        return collective
    mine = [part for ranks in groups if (part := collective.split(ranks)) is not None]
    return mine[0]


def axes_of(part: DeviceMesh, mesh: DeviceMesh) -> tuple[frozenset[str], ...] | None:
    """For each dim of a mesh of some of the ranks, the axes of `mesh` that it runs along: one, several that were
    flattened, or none for a dim of one rank. None where it runs along none of them."""
    coordinate = part.get_coordinate()
    assert coordinate is not None
    found = []
    for dim in range(part.ndim):
        here = [slice(None) if other == dim else place for other, place in enumerate(coordinate)]
        axes = _axes_through(mesh, sorted(part.mesh[tuple(here)].tolist()))
        if axes is None:
            return None
        found.append(axes)
    return tuple(found)


def _axes_through(mesh: DeviceMesh, ranks: list[int]) -> frozenset[str] | None:
    assert mesh.mesh_dim_names is not None
    if len(ranks) == 1:
        return frozenset()
    wide = [axis for axis in mesh.mesh_dim_names if degree(mesh, axis) > 1]
    for count in range(1, len(wide) + 1):
        for axes in combinations(wide, count):
            if ranks in _groups(mesh, axes):
                return frozenset(axes)
    return None


def _groups(mesh: DeviceMesh, axes: Sequence[str]) -> list[list[int]]:
    """The groups of ranks within which only the coordinates along `axes` differ, each in ascending order."""
    assert mesh.mesh_dim_names is not None
    dims = [dim for dim, axis in enumerate(mesh.mesh_dim_names) if axis in axes]
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    size = math.prod(mesh.size(dim) for dim in dims)
    groups: list[list[int]] = mesh.mesh.permute(*others, *dims).reshape(-1, size).tolist()
    return groups
