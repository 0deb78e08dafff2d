"""The argument and the return value of the user's `parallelize` function: `ManualContext` and `Parallelized`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.precision.precision import Precision
from fabric.strategies.sharding.mesh import along

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ManualContext:
    """This rank, its device, collectives and mesh."""

    world: World
    device: torch.device
    """The device of this rank's tensors. Only `shard` moves tensors to it; the function moves the rest."""
    collective: Collective
    """The collective of all ranks."""
    mesh: DeviceMesh
    """The mesh of all ranks, with the axes of `ManualStrategy(mesh=...)`, for `fully_shard` and DTensors."""
    precision: Precision
    """The precision of `Fabric(precision=...)`."""

    def along(self, *axes: str) -> Collective:
        """The collective of the ranks that differ from this one only along `axes`. Ranks: all, with the same axes."""
        return along(self.collective, self.mesh, axes)

    def shard(self, parameter: nn.Parameter, dim: int = 0, axis: str | None = None) -> nn.Parameter:
        """Shard a parameter along an axis of the mesh: returns a DTensor on `device`, with the values of rank 0.

        Its `to_local()` is this rank's shard: with N rows and R ranks, rank r has at most ceil(N / R) rows, starting
        at r * ceil(N / R). It is replicated along other axes. `axis` may be omitted if the mesh has one axis only.
        Assign the result to the module, under the parameter's name. Ranks: all call it, in the same order.
        Raises: ValueError: an axis that does not exist.
        """
        from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

        axes = self.mesh.mesh_dim_names or ()
        chosen = axes[0] if axis is None and len(axes) == 1 else axis
        if chosen not in axes:
            names = ", ".join(map(repr, axes))
            raise ValueError(f"`shard(axis={axis!r})`: the mesh has the axes {names}. Name one of them.")
        placements: list[Placement] = [Shard(dim) if each == chosen else Replicate() for each in axes]
        cut = distribute_tensor(parameter.detach().to(self.device), self.mesh, placements)
        return nn.Parameter(cut, requires_grad=parameter.requires_grad)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelized:
    """The result of `parallelize`, if it returns more than the module."""

    module: nn.Module
    """The module that the loop calls: the one that the function was given, or another with its parameters."""
    averaged: nn.Module | Sequence[nn.Module] = ()
    """Submodules whose gradients are averaged over the ranks along the data axes after each backward. Gradients of
    plain parameters are averaged in a few all-reduces. Gradients of DTensors, which backward sums over the ranks that
    used them, are divided by the number of ranks. Plain parameters are broadcast from rank 0 at setup, and buffers
    after each backward. Modules within DistributedDataParallel, and gradients that FSDP2 averages, are skipped."""
    finish_backward: Callable[[], None] | None = None
    """Called after each backward outside of `no_backward_sync`, to synchronise gradients yourself."""
    unsynced: Callable[[], AbstractContextManager[object]] | None = None
    """Context that `no_backward_sync` enters. Not needed for `averaged`, `finish_backward`, DDP and FSDP2."""

    def __post_init__(self) -> None:
        for part in (self.module, *self.averaged_modules):
            if not isinstance(part, nn.Module):
                raise TypeError(
                    f"`Parallelized(...)` has a `{type(part).__name__}`, which is not a module. Pass modules; "
                    "`nn.ParameterList([...])` makes a module of parameters."
                )

    @property
    def averaged_modules(self) -> tuple[nn.Module, ...]:
        """`averaged` as a tuple."""
        return (self.averaged,) if isinstance(self.averaged, nn.Module) else tuple(self.averaged)
