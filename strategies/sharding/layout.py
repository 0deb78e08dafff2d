"""How a parallelized model is distributed over a mesh: along which axes, and who averages its gradients.

Layouts that would give wrong gradients are refused here, before the first forward. No communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import nn

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.sharding.mesh import axes_of, degree
from fabric.strategies.tensors.dtensor import as_sharded, user_class
from fabric.strategies.tensors.parameters import parameters_by_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

DATA_AXES = ("data", "shard", "context")
"""Ranks along these axes read different data, so gradients are averaged along them."""
Parallelize: TypeAlias = "Callable[[Any, DeviceMesh], nn.Module | None]"
"""`function(model, mesh)` parallelizes the model in place, and may return it."""


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


def refuse_cut(module: nn.Module, instead: str) -> None:
    """Raise ValueError if a parameter is sharded before `setup`.

    `instead`: what to write, with `{name}` for the class of its module.
    """
    for name, part in module.named_modules():
        cut = [each for each, parameter in part.named_parameters(recurse=False) if as_sharded(parameter) is not None]
        if cut:
            units = [each for each in module.modules() if user_class(each) is not type(each) and part in each.modules()]
            full = f"{name}.{cut[0]}".lstrip(".")
            raise ValueError(
                f"`{full}` is in shards before `fabric.setup`, each with values of its own rank, and all ranks start "
                f"from the weights of rank 0. {instead.format(name=user_class((units or [part])[-1]).__name__)}"
            )


def unaveraged(module: nn.Module, mesh: DeviceMesh) -> dict[tuple[str, ...], list[nn.Parameter]]:
    """The parameters of a parallelized model whose gradients no wrapper averages, by the axes along which it does not.
    Along all other data axes `fully_shard` does.

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


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """The submodules that `fully_shard` was called on."""
    if all(as_sharded(parameter) is None for parameter in module.parameters()):
        return []  # and torch's FSDP need not be imported
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _axes_of(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> frozenset[str]:
    """The axes that a parameter is distributed over."""
    sharded = as_sharded(parameter)
    if sharded is None:
        return frozenset()
    axes = axes_of(sharded.device_mesh, mesh)
    if axes is None:
        raise ValueError(
            f"`{name}` is sharded over a mesh of its own, {sharded.device_mesh}, which is no submesh of the mesh "
            "that `parallelize_fn` was given. Take parts of that one: `mesh['tensor']`, `mesh['data', 'shard']`."
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
