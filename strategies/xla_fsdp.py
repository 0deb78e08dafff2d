"""One program over all devices of a host: parameters and optimizer state in shards, each batch cut among them.

XLA's SPMD (GSPMD: Xu et al., 2021, arXiv:2105.04663) does the sharding, from marks on tensors. They are those of
torch_xla's FSDPv2, whose wrapper is left out: it would stand around the user's module, in its names, for nothing else.
There is one process and one rank, and every tensor looks whole: the numbers are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.data.share import Use
from fabric.strategies.data.transfer import movables
from fabric.strategies.initialize import new_tensors
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.replica import replica, share_loader
from fabric.strategies.runtime import Runtime, connect
from fabric.strategies.strategy import Strategy
from fabric.strategies.xla_device import (
    XLAState,
    each,
    mark_steps,
    marked_batches,
    place,
    prepare_optimizers,
    refuse_accelerator,
    seed_device,
    unbias_statistics,
)


@final
@dataclass(frozen=True, kw_only=True)
class XLAFSDPStrategy(Strategy):
    """Fully sharded over the devices of one host, by one process. `batch_size` is that of all devices together.

    The process is given to SPMD for good: replicas, and a plain XLA device, need another one.
    """

    @property
    def marks_steps(self) -> bool:
        return True

    @property
    def launchers(self) -> tuple[str, ...]:
        return ("inline",)

    def num_processes(self, num_devices: int) -> int:
        return 1

    def refuse(self, accelerator: Accelerator, num_devices: int, num_nodes: int, precision: Precision) -> str | None:
        sentence = refuse_accelerator("xla_fsdp", accelerator)
        if sentence is not None:
            return sentence
        if num_nodes > 1:
            return (
                f"`num_nodes={num_nodes}` with `strategy='xla_fsdp'`, which is one process on one host. Leave "
                "`num_nodes` out, or write `strategy='xla'`."
            )
        if num_devices != accelerator.num_devices():
            return (
                f"`devices={num_devices}` with `strategy='xla_fsdp'`, but PJRT has {accelerator.num_devices()} devices "
                "here, and the program is of all. Leave `devices` out, or show PJRT fewer: by CPU_NUM_DEVICES, or by "
                "TPU_VISIBLE_CHIPS on a TPU."
            )
        return None

    def connect(self, world: World, accelerator: Accelerator, devices: Sequence[int], precision: Precision) -> Runtime:
        import torch_xla
        import torch_xla.runtime as xr

        if not xr.is_spmd():
            if torch_xla._XLAC._xla_runtime_is_initialized():
                raise RuntimeError(
                    "This process has used an XLA device already, and `strategy='xla_fsdp'` must be told to XLA "
                    "before that. Make the `Fabric`, and launch, before the first tensor on 'xla'."
                )
            xr.use_spmd()
        device = torch_xla.device()
        seed_device()
        return connect(world, [device], SingleDeviceCollective(), precision)

    def init_module(self, runtime: Runtime, *, empty: bool) -> AbstractContextManager[None]:
        return new_tensors(runtime.device, runtime.precision, empty=empty)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        place(runtime, module, optimizers, to_device=move)
        for parameter in module.parameters():
            _cut(parameter)
        undo = [_lay_states(optimizers), mark_steps(optimizers), unbias_statistics(module)]
        return replace(replica(runtime, module, optimizers, end=partial(each, undo)), state=XLAState(rank=0))

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        return partial(each, [_lay_states(optimizers), prepare_optimizers(runtime, optimizers)])

    def process_dataloader(
        self, runtime: Runtime, loader: Iterable[Any], use: Use, *, distribute: bool, move: bool
    ) -> Iterable[Any]:
        return share_loader(runtime, loader, use, distribute=distribute, move=move, carry=_cut_batches)


def _mesh() -> Any:
    """All devices of the host, along the one axis that FSDPv2 cuts along."""
    import numpy
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as xr

    count = xr.global_runtime_device_count()
    return spmd.Mesh(numpy.arange(count), (count,), ("fsdp",))


def _cut_batches(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the devices, each tensor cut along its first dim where that can be divided, whole elsewhere."""
    import torch_xla.distributed.spmd as spmd

    mesh = _mesh()
    for batch in marked_batches(batches, device):
        for tensor in movables(batch):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] % mesh.size() == 0:
                spmd.mark_sharding(tensor, mesh, ("fsdp", *(None,) * (tensor.ndim - 1)))
        yield batch


def _lay_states(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let each optimizer, once it has stepped, lay its state out as its parameters are. Returns what undoes it."""
    handles = [optimizer.register_step_post_hook(_shard_states) for optimizer in optimizers]
    return partial(each, [handle.remove for handle in handles])


def _shard_states(optimizer: Optimizer, *_: Any) -> None:
    for parameter, entries in optimizer.state.items():
        for value in entries.values():
            if isinstance(value, Tensor) and value.device == parameter.device and value.shape == parameter.shape:
                _cut(value)


def _cut(tensor: Tensor) -> None:
    """Cut a tensor along its longest dim, as FSDPv2 does, unless it is cut already."""
    import torch_xla
    import torch_xla.distributed.spmd as spmd

    if tensor.ndim and not torch_xla._XLAC._get_xla_sharding_spec(tensor):
        longest = list(tensor.shape).index(max(tensor.shape))
        spmd.mark_sharding(tensor, _mesh(), tuple("fsdp" if dim == longest else None for dim in range(tensor.ndim)))
