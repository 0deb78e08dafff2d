"""Device meshes: the ranks of a world along named axes, and how a model is distributed over them.

The sizes of the axes multiply to the world size. Ranks are numbered with the last axis fastest, so its ranks are
adjacent. A distribution that would give wrong gradients is refused before the first forward, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import nn

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.sharding.fully_shard import fsdp_modules
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.parameters import parameters_by_name, uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Degree: TypeAlias = int | Literal["auto"]

DATA_AXES = ("data", "shard", "context")
"""Ranks along these axes read different data, so gradients are averaged along them."""
Parallelize: TypeAlias = "Callable[[Any, DeviceMesh], nn.Module | None]"
"""`function(model, mesh)` parallelizes the model in place, and may return it."""

COPIES = (
    "`all_gather(sync_grads=True)` over all ranks of a mesh, where some ranks read the same samples: the result would "
    "have copies of these samples, and gradients would count each copy. Name the axes of ranks that read others: "
    "`all_gather(x, group=along(fabric.collective, mesh, ['data', 'shard']), sync_grads=True)`, with the axes of your "
    "data, and `along` from `fabric.strategies`."
)
"""The error of a gather with gradients over ranks that read the same data."""


def check_written(written: Mapping[str, Degree]) -> None:
    """Raise ValueError if a degree of `ModelParallelStrategy` is not a number."""
    for axis, number in written.items():
        if number != "auto" and (type(number) is not int or number < 1):
            raise ValueError(
                f"`ModelParallelStrategy({axis}={number!r})`: a degree is a number of ranks from 1 on, or 'auto' "
                "for what the other axes leave."
            )


def complete(written: Mapping[str, Degree], size: int) -> dict[str, int]:
    """The degrees, with "auto" replaced. Raises ValueError if they do not multiply to `size`."""
    known = math.prod(number for number in written.values() if number != "auto")
    degrees = {axis: max(size // known, 1) if number == "auto" else number for axis, number in written.items()}
    check_degrees(degrees, size, written=", ".join(f"{axis}={number!r}" for axis, number in written.items()))
    return degrees


def check_degrees(degrees: Mapping[str, int], size: int, *, written: str) -> None:
    """Raise ValueError if the degrees do not multiply to `size`, the number of ranks.

    `written`: the user's arguments.
    """
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
    """The collective of the ranks that differ from this one only along `axes`.

    Ranks: all of the mesh and of `collective`, which are the same, with the same `axes`.
    Raises: ValueError: no such axis.
    """
    assert mesh.mesh_dim_names is not None
    if not axes or not set(axes) <= set(mesh.mesh_dim_names):
        raise ValueError(
            f"`along({', '.join(map(repr, axes))})`: the mesh has the axes "
            f"{', '.join(map(repr, mesh.mesh_dim_names))}. Name some."
        )
    groups = _groups(mesh, axes)
    if len(groups) == 1:
        return collective
    mine = [part for ranks in groups if (part := collective.split(ranks)) is not None]
    return mine[0]


def axes_of(part: DeviceMesh, mesh: DeviceMesh) -> tuple[frozenset[str], ...] | None:
    """For each dim of a submesh, the axes of `mesh` that it covers: one, several flattened ones, or none for a dim of
    one rank. None if it does not follow axes of `mesh`."""
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
    """The groups of ranks that differ only along `axes`, each in ascending order."""
    assert mesh.mesh_dim_names is not None
    dims = [dim for dim, axis in enumerate(mesh.mesh_dim_names) if axis in axes]
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    size = math.prod(mesh.size(dim) for dim in dims)
    groups: list[list[int]] = mesh.mesh.permute(*others, *dims).reshape(-1, size).tolist()
    return groups


def parallelize(module: nn.Module, mesh: DeviceMesh, function: Parallelize) -> nn.Module:
    """Call the user's function on the model and the mesh. Returns the model, or its compiled form.

    Raises: TypeError: the function returned another object. ValueError: it changed names.
    """
    before = parameters_by_name(module)
    result = function(module, mesh)
    if result is not None and (not isinstance(result, nn.Module) or uncompiled(result) is not module):
        raise TypeError(
            f"`parallelize_fn` was given a `{type(module).__name__}` and returned another object, a "
            f"`{type(result).__name__}`. Change the model in place, and return it, or nothing."
        )
    changed = sorted(before.keys() ^ parameters_by_name(module).keys())
    if changed:
        some = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
        raise ValueError(
            f"`parallelize_fn` added, removed or renamed parameters: {some}. Checkpoints and optimizers know them by "
            "their names. Do that before `setup`; to compile a submodule, call `submodule.compile()`, which renames "
            "nothing."
        )
    return module if result is None else result


def unaveraged(module: nn.Module, mesh: DeviceMesh) -> dict[tuple[str, ...], list[nn.Parameter]]:
    """The parameters of a parallelized model, by the data axes along which `fully_shard` does not average their
    gradients.

    Raises: ValueError: an axis is not used, or a parameter would get wrong gradients.
    """
    data = [axis for axis in DATA_AXES if degree(mesh, axis) > 1]
    managed = {parameter for part in fsdp_modules(module) for parameter in cast(nn.Module, part).parameters()}
    found: dict[tuple[str, ...], list[nn.Parameter]] = {}
    used: set[str] = set()
    for name, parameter in module.named_parameters():
        axes = _axes_of(name, parameter, mesh)
        used |= axes
        averaged = axes & set(data)
        if averaged and parameter not in managed:
            raise ValueError(
                f"`{name}` is sharded over the axis {_words(averaged)}, whose ranks have different data, but not by "
                f"`fully_shard`, so its gradients would be wrong. Use `fully_shard(module, mesh=mesh['shard'])`; "
                "`parallelize_module` and `distribute_tensor` are for `mesh['tensor']`."
            )
        left = tuple(axis for axis in data if axis not in averaged)
        if left:
            found.setdefault(left, []).append(parameter)
    _refuse_unused(mesh, used)
    return found


def _axes_of(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> frozenset[str]:
    """The axes that a parameter is distributed over."""
    sharded = as_sharded(parameter)
    if sharded is None:
        return frozenset()
    axes = axes_of(sharded.device_mesh, mesh)
    if axes is None:
        raise ValueError(
            f"`{name}` is sharded over a mesh of its own, {sharded.device_mesh}, which is no submesh of the mesh "
            "that `parallelize_fn` was given. Take submeshes of this: `mesh['tensor']`, `mesh['data', 'shard']`."
        )
    mixed = next((each for each in axes if len(each) > 1 and not each <= set(DATA_AXES)), None)
    if mixed is not None:
        raise ValueError(
            f"`{name}` is sharded over the axes {_words(mixed)} as one. Ranks along 'tensor' have the same data and "
            "those along 'shard' different data. Name the mesh: `fully_shard(module, mesh=mesh['shard'])`."
        )
    return frozenset[str]().union(*axes)


def _refuse_unused(mesh: DeviceMesh, used: set[str]) -> None:
    ways = {
        "shard": "`fully_shard(module, mesh=mesh['shard'])`",
        "tensor": "`parallelize_module(module, mesh['tensor'], plan)`",
    }
    for axis, way in ways.items():
        if degree(mesh, axis) > 1 and axis not in used:
            raise ValueError(
                f"`{axis}={degree(mesh, axis)}` was written, but `parallelize_fn` sharded no parameter over "
                f"`mesh[{axis!r}]`. Call {way} in it, or write `{axis}=1`."
            )


def _words(axes: Iterable[str]) -> str:
    return " and ".join(map(repr, sorted(axes)))
