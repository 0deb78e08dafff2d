"""What a function that lays a model over the ranks is given, and what it may answer."""

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
from fabric.strategies.sharding.dtensor import as_sharded
from fabric.strategies.sharding.mesh import along

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ManualContext:
    """Where this rank stands, and what it talks with."""

    world: World
    device: torch.device
    """Where this rank's tensors are to live. Nothing is moved there but by `shard`."""
    collective: Collective
    """All ranks."""
    mesh: DeviceMesh
    """All ranks along the axes of `ManualStrategy(mesh=...)`, for `fully_shard` and DTensors of one's own."""
    precision: Precision
    """What `Fabric(precision=...)` said."""

    def along(self, *axes: str) -> Collective:
        """The ranks that differ from this one along these axes alone. Ranks: all call it, with the same axes."""
        return along(self.collective, self.mesh, axes)

    def shard(self, parameter: nn.Parameter, dim: int = 0, axis: str | None = None) -> nn.Parameter:
        """Cut a parameter along an axis of the mesh: a DTensor on `device`, with the values of rank 0.

        `parameter.to_local()` is this rank's piece: of N rows over R ranks rank r has those from r * ceil(N / R) on, as
        many as there are, and at most ceil(N / R). Along other axes ranks have the same. `axis` may be left out where
        the mesh has one. Set the result in the module under the parameter's name. Ranks: all, in the same order.
        """
        from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

        if axis is None and len(self._axes) > 1:
            raise ValueError(f"`shard(parameter)` on a mesh with the axes {self._names()}: name one as `axis`.")
        chosen = self._axes[0] if axis is None else axis
        if chosen not in self._axes:
            raise ValueError(f"`shard(axis={axis!r})`: the mesh has the axes {self._names()}. Name one of them.")
        if as_sharded(parameter) is not None:
            raise ValueError("`shard(parameter)` of a DTensor, which lies in shards already. Pass a plain parameter.")
        if not -parameter.ndim <= dim < parameter.ndim:
            raise ValueError(
                f"`shard(dim={dim})` of a parameter of shape {tuple(parameter.shape)}. Name one of its dims."
            )
        placements: list[Placement] = [Shard(dim) if each == chosen else Replicate() for each in self._axes]
        cut = distribute_tensor(parameter.detach().to(self.device), self.mesh, placements)
        return nn.Parameter(cut, requires_grad=parameter.requires_grad)

    @property
    def _axes(self) -> tuple[str, ...]:
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names

    def _names(self) -> str:
        return ", ".join(map(repr, self._axes))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelized:
    """What the function made, where there is more to say than the module."""

    module: nn.Module
    """What the loop calls: the module the function was given, or one that holds its parameters."""
    averaged: nn.Module | Sequence[nn.Module] = ()
    """Modules in it whose gradients become those of the mean of the losses of all ranks (along the data axes), after
    each backward: a plain parameter's are averaged, in few messages; a shard's, which arrive as a sum from the ranks
    that used it, are divided. Plain ones start from the values of rank 0, and buffers follow it. What lies in a
    DistributedDataParallel is left to that, and what FSDP2 averages is not averaged twice."""
    finish_backward: Callable[[], None] | None = None
    """Called after each backward outside of `no_backward_sync`, for gradients that you exchange yourself."""
    unsynced: Callable[[], AbstractContextManager[object]] | None = None
    """Entered by `no_backward_sync`. `averaged`, `finish_backward`, DistributedDataParallel and FSDP2 need none."""
    release: Callable[[], None] | None = None
    """Called when the fabric lets go of the module: takes off what the function put on."""

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"`Parallelized(module={self.module!r})` is no module. Pass the one that the loop calls.")
        strangers = [part for part in self.averaged_modules if not isinstance(part, nn.Module)]
        if strangers:
            raise TypeError(
                f"`Parallelized(averaged=...)` has a `{type(strangers[0]).__name__}`, which is no module. Pass "
                "modules; `nn.ParameterList([...])` makes one of parameters."
            )

    @property
    def averaged_modules(self) -> tuple[nn.Module, ...]:
        """`averaged`, always as several."""
        return (self.averaged,) if isinstance(self.averaged, nn.Module) else tuple(self.averaged)
