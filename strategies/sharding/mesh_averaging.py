"""Averaging of gradients over the mesh axes that no wrapper reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import nn

from fabric.strategies.gradients.averaging import average, redistribute
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.layout import DATA_AXES, fsdp_modules, unaveraged
from fabric.strategies.sharding.mesh import along, degree


@final
class MeshAveraging:
    """Gradient averaging of one model on a mesh, and whether the next backward synchronises.

    Ranks: all create it together, one for each model.
    """

    def __init__(self, runtime: Runtime, module: nn.Module) -> None:
        assert runtime.mesh is not None
        by_axes = unaveraged(module, runtime.mesh)
        data = tuple(axis for axis in DATA_AXES if degree(runtime.mesh, axis) > 1)
        # Ranks whose models differ (pipeline stages) may need different groups, and all ranks must create each of them.
        wanted = {axes for axes in (*by_axes, data) if axes}
        wanted = wanted.union(*runtime.collective.all_gather_object(wanted))
        groups = {axes: along(runtime.collective, runtime.mesh, axes).for_gradients() for axes in sorted(wanted)}
        self.module = module
        self.synced = True
        self.parameters = list(module.parameters())
        self.unaveraged = [(groups[axes], parameters) for axes, parameters in by_axes.items()]
        self.data = groups[data] if data else None
        """The ranks that hold the same part of the model, and read other data; None: there is no other."""
        self.sharded = fsdp_modules(module)

    def watch(self) -> Callable[[], None] | None:
        """See `GradientSync.watch`."""
        return self.average if self.synced else None

    def average(self) -> None:
        """Average all gradients that no wrapper reduces. Ranks: all, after the backward."""
        redistribute(self.parameters)
        for collective, parameters in self.unaveraged:
            average(collective, parameters)

    def set_synced(self, synced: bool) -> None:
        """See `GradientSync.set_synced`."""
        self.synced = synced
        for part in self.sharded:
            part.set_requires_gradient_sync(synced, recurse=False)
