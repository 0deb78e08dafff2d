"""Model parallelism over a mesh of XLA devices: the user's function marks shardings, within one process (SPMD).

The mesh is of devices, not of ranks: every tensor has its global shape, and XLA inserts the collectives. So nothing is
averaged here, loaders are not distributed, and a sharding cannot change the numbers. See `spmd.py`.

    def parallelize(model, mesh):
        mark_sharding(model.up.weight, mesh, ("tensor", None))
        mark_sharding(model.down.weight, mesh, (None, "tensor"))

    Fabric(accelerator="xla", strategy=XLAModelParallelStrategy(parallelize_fn=parallelize, data="auto", tensor=2))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.module.parameter_rebinding import parameters_by_name
from fabric.strategies.options import check_function
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.layout import parallelize
from fabric.strategies.sharding.mesh import Degree, check_written, complete
from fabric.strategies.target import Target
from fabric.strategies.xla.device import place
from fabric.strategies.xla.spmd import (
    axes_of,
    connect_program,
    mesh_of_devices,
    prepare_program,
    prepare_program_optimizers,
    refuse_program,
)
from fabric.strategies.xla.torch_xla_strategy import TorchXLAStrategy

MarkingFunction: TypeAlias = Callable[[Any, Any], "nn.Module | None"]
"""`function(model, mesh)`, the mesh a `torch_xla.distributed.spmd.Mesh`. It may return the model, or None."""


@final
@dataclass(frozen=True, kw_only=True)
class XLAModelParallelStrategy(TorchXLAStrategy):
    """A mesh of all XLA devices of a host, over which `parallelize_fn(model, mesh)` shards a model by `mark_sharding`.

    The mesh has the axes "data", "shard" and "tensor", also those of degree 1. A parameter may be sharded along any of
    them, and is replicated otherwise. Batches are sharded along "data" and "shard" by their first dim, if that is
    divisible. `batch_size` is that of all devices together. A degree is a number of devices; one of them may be "auto":
    the remaining devices. SPMD cannot be switched off again in a process.

    Args:
        parallelize_fn: `parallelize_fn(model, mesh)`, called by `setup` with the model on the device.
        data: Number of devices with different samples.
        shard: Number of devices with different samples and a shard of the parameters that are marked along it.
        tensor: Number of devices with the same samples and a shard of the parameters that are marked along it.
        activation_checkpointing_policy: Submodules whose activations are recomputed in backward instead of stored:
            "blocks" (`blocks_of(model)`), classes, or a function of a module.
    """

    parallelize_fn: MarkingFunction | None = None
    """Called by `setup`, with the user's model on the device."""
    data: Degree = 1
    """Number of devices with different samples."""
    shard: Degree = 1
    """Number of devices with different samples, and a shard of the parameters that are marked along it."""
    tensor: Degree = 1
    """Number of devices with the same samples, and a shard of the parameters that are marked along it."""

    def __post_init__(self) -> None:
        check_function(self, "parallelize_fn", "parallelize_fn(model, mesh)")
        check_written("XLAModelParallelStrategy", self._written())

    def refuse(self, target: Target) -> str | None:
        if self.parallelize_fn is None:
            return (
                "`strategy='model_parallel'` has no function that parallelises the model. Write "
                "`strategy=ModelParallelStrategy(parallelize_fn=function, tensor=2)`, from `fabric.strategies`, with a "
                "`function(model, mesh)` that calls `torch_xla.distributed.spmd.mark_sharding(weight, mesh, "
                "('tensor', None))`."
            )
        if target.accelerator.name == "xla":
            try:
                self._degrees(target.num_available)
            except ValueError as error:
                return str(error)
        return refuse_program("model_parallel", target)

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        return connect_program("model_parallel", world, precision, self._degrees(len(devices)), ("data", "shard"))

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        assert self.parallelize_fn is not None
        import torch_xla.runtime as xr

        inner, mesh = uncompiled(module), mesh_of_devices(self._degrees(xr.global_runtime_device_count()))
        place(runtime, module, optimizers, to_device=move)
        before = parameters_by_name(inner)
        result = parallelize(inner, mesh, self.parallelize_fn)
        _refuse_replaced(inner, before)
        _refuse_unused(inner, mesh)
        return prepare_program(runtime, module if result is inner else result, optimizers)

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return prepare_program_optimizers(runtime, optimizers)

    def _written(self) -> dict[str, Degree]:
        return {"data": self.data, "shard": self.shard, "tensor": self.tensor}

    def _degrees(self, num_devices: int) -> dict[str, int]:
        return complete(self._written(), num_devices, of="devices")


def _refuse_replaced(module: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if a parameter was replaced: optimizers would still have the former one."""
    replaced = [name for name, p in parameters_by_name(module).items() if p is not before[name]]
    if replaced:
        raise ValueError(
            f"`parallelize_fn` replaced the parameters {', '.join(replaced)}. `mark_sharding` marks a parameter in "
            "place: call it, and do not assign another parameter."
        )


def _refuse_unused(module: nn.Module, mesh: Any) -> None:
    """Raise ValueError if no parameter is sharded along an axis that is for parameters."""
    used = frozenset[str]().union(*(axes_of(parameter, mesh) for parameter in module.parameters()))
    for axis in ("shard", "tensor"):
        number = mesh.shape()[axis]
        if number > 1 and axis not in used:
            raise ValueError(
                f"`{axis}={number}` was written, but `parallelize_fn` sharded no parameter along axis {axis!r}. Call "
                f"`torch_xla.distributed.spmd.mark_sharding(weight, mesh, ({axis!r}, None))` in it, or write "
                f"`{axis}=1`."
            )
