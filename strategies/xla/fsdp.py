"""Parameters, optimizer state and batches sharded over all devices of a host, by one process (SPMD).

XLA's SPMD (GSPMD: Xu et al., 2021, arXiv:2105.04663) shards tensors along the axes of a device mesh, as they are
marked, and inserts the collectives. There is one process and one rank, and every tensor has its global shape: whatever
is marked, the numbers are those of one device. Shardings determine memory and communication only.
The shardings are those of torch_xla's FSDPv2, without its wrapper, which would only change the names in the module. A
sharding that the user has marked before `setup` stays, along the axes of any mesh of all devices: tensor parallelism.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.capabilities import Target
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.data.transfer import movables
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, replica
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.undo import undo_all
from fabric.strategies.xla.device import (
    XLAState,
    marked_batches,
    place,
    prepare_module,
    prepare_optimizers,
    refuse_accelerator,
)
from fabric.strategies.xla.torch_xla_strategy import TorchXLAStrategy


@final
@dataclass(frozen=True, kw_only=True)
class XLAFSDPStrategy(TorchXLAStrategy):
    """Fully sharded over the devices of one host, by one process. `batch_size` is that of all devices together.

    Parameters that `torch_xla.distributed.spmd.mark_sharding` has marked before `setup` keep their sharding. SPMD
    cannot be switched off again in a process: replicas, and a plain XLA device, need another process.
    """

    def refuse(self, target: Target) -> str | None:
        sentence = refuse_accelerator("xla_fsdp", target)
        if sentence is not None:
            return sentence
        if target.num_nodes > 1:
            return (
                f"`num_nodes={target.num_nodes}` with `strategy='xla_fsdp'`, which is one process on one host over "
                "XLA. Leave `num_nodes` out, or write `strategy='xla'`."
            )
        if target.num_devices != target.num_available:
            return (
                f"`devices={target.num_devices}` with `strategy='xla_fsdp'`, but PJRT has {target.num_available} "
                "devices here, and SPMD uses all. Leave `devices` out, or show PJRT fewer: by CPU_NUM_DEVICES, or by "
                "TPU_VISIBLE_CHIPS on a TPU."
            )
        return None

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        """Switch on SPMD in this process, irrevocably. Raises: RuntimeError: the process has used a device already."""
        import torch_xla
        import torch_xla.runtime as xr

        from fabric.launchers.xla_internals import runtime_is_initialized

        if not xr.is_spmd():
            if runtime_is_initialized():
                raise RuntimeError(
                    "This process has used an XLA device already, and `strategy='xla_fsdp'` must be set in XLA before "
                    "that. Make the `Fabric`, and launch, before the first tensor on 'xla'."
                )
            xr.use_spmd()
        device = torch_xla.device()
        accelerator.seed()
        return open_runtime(world, [device], SingleDeviceCollective(), precision, carry=_sharded_batches)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, to_device=move)
        _shard(module)
        undo = undo_all([_shard_states(optimizers), prepare_module(module, optimizers)])
        return replace(replica(runtime, module, optimizers, end=undo), state=XLAState())

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return undo_all([_shard_states(optimizers), prepare_optimizers(runtime, optimizers)])


def _mesh() -> Any:
    """A `torch_xla.distributed.spmd.Mesh` of all devices of the host, along one axis."""
    import numpy
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as xr

    size = xr.global_runtime_device_count()
    return spmd.Mesh(numpy.arange(size), (size,), ("fsdp",))


def _shard(module: nn.Module) -> None:
    """Shard each parameter along its longest dim, as FSDPv2 does, unless it is marked already."""
    import torch_xla.distributed.spmd as spmd

    mesh = _mesh()
    for parameter in module.parameters():
        if parameter.ndim and not _is_marked(parameter):
            longest = list(parameter.shape).index(max(parameter.shape))
            spmd.mark_sharding(parameter, mesh, tuple("fsdp" if d == longest else None for d in range(parameter.ndim)))


def _sharded_batches(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches, each tensor sharded along its first dim, or replicated if that is not divisible."""
    import torch_xla.distributed.spmd as spmd

    mesh = _mesh()
    for batch in marked_batches(batches, device):
        for tensor in movables(batch):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] % mesh.size() == 0:
                spmd.mark_sharding(tensor, mesh, ("fsdp", *(None,) * (tensor.ndim - 1)))
        yield batch


def _is_marked(tensor: Tensor) -> bool:
    """Whether the tensor has a sharding, marked or propagated by XLA."""
    from fabric.launchers.xla_internals import sharding_of

    return bool(sharding_of(tensor))


def _shard_states(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Shard optimizer states like their parameters after each step. Returns a function that removes the hooks."""
    return undo_all([hook_steps(optimizer, after=_shard_state) for optimizer in optimizers])


def _shard_state(optimizer: Optimizer, *_: Any) -> None:
    from fabric.launchers.xla_internals import native

    for parameter, entries in optimizer.state.items():
        alike = [v for v in entries.values() if isinstance(v, Tensor) and v.shape == parameter.shape]
        for value in alike:
            if value.device == parameter.device and _is_marked(parameter) and not _is_marked(value):
                native._xla_mark_sharding(value, native._get_xla_op_sharding(parameter))
