"""Parameters, optimizer state and batches sharded over all devices of a host, by one process (SPMD, see `spmd.py`).

The sharding is that of torch_xla's FSDPv2, without its wrapper, which would only change the names in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.target import Target
from fabric.strategies.xla.device import place
from fabric.strategies.xla.spmd import (
    connect_program,
    is_marked,
    mesh_of_devices,
    prepare_program,
    prepare_program_optimizers,
    refuse_program,
)
from fabric.strategies.xla.torch_xla_strategy import TorchXLAStrategy


@final
@dataclass(frozen=True, kw_only=True)
class XLAFSDPStrategy(TorchXLAStrategy):
    """Fully sharded over the devices of one host, by one process. `batch_size` is that of all devices together.

    SPMD cannot be switched off again in a process: replicas, and a plain XLA device, need another one.

    Args:
        activation_checkpointing_policy: Submodules whose activations are recomputed in backward instead of stored:
            "blocks" (`blocks_of(model)`), classes, or a function of a module.
    """

    def refuse(self, target: Target) -> str | None:
        return refuse_program("xla_fsdp", target)

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        return connect_program("xla_fsdp", world, precision, _degrees(len(devices)), ("fsdp",))

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, to_device=move)
        _cut(module)
        return prepare_program(runtime, module, optimizers)

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return prepare_program_optimizers(runtime, optimizers)


def _degrees(num_devices: int) -> dict[str, int]:
    """All devices of the host, along one axis."""
    return {"fsdp": num_devices}


def _cut(module: nn.Module) -> None:
    """Shard each parameter along its longest dim, as FSDPv2 does, unless it is marked already."""
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as xr

    mesh = mesh_of_devices(_degrees(xr.global_runtime_device_count()))
    for parameter in module.parameters():
        if parameter.ndim and not is_marked(parameter):
            longest = list(parameter.shape).index(max(parameter.shape))
            spmd.mark_sharding(parameter, mesh, tuple("fsdp" if d == longest else None for d in range(parameter.ndim)))
