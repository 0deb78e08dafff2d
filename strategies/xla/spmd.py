"""SPMD over all devices of a host: what `xla_fsdp` and `model_parallel` over XLA share.

XLA's SPMD (GSPMD: Xu et al., 2021, arXiv:2105.04663) shards tensors along the axes of a device mesh, as they are
marked, and inserts the collectives. There is one process and one rank, and every tensor has its global shape: whatever
is marked, the numbers are those of one device. Shardings determine memory and communication only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.launchers.world import World
from fabric.strategies.collectives.single import SingleDeviceCollective
from fabric.strategies.data.transfer import movables
from fabric.strategies.module.prepare import replica
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime, open_runtime
from fabric.strategies.target import Target
from fabric.strategies.undo import undo_all
from fabric.strategies.xla.device import (
    XLAState,
    marked_batches,
    prepare_module,
    prepare_optimizers,
    refuse_accelerator,
    seed_device,
)


def refuse_program(word: str, target: Target) -> str | None:
    """The error message unless the devices are all those of one host. `word`: the name of the strategy."""
    sentence = refuse_accelerator(word, target)
    if sentence is not None:
        return sentence
    if target.num_nodes > 1:
        return (
            f"`num_nodes={target.num_nodes}` with `strategy={word!r}`, which is one process on one host over XLA. "
            "Leave `num_nodes` out, or write `strategy='xla'`."
        )
    if target.num_devices != target.num_available:
        return (
            f"`devices={target.num_devices}` with `strategy={word!r}`, but PJRT has {target.num_available} devices "
            "here, and SPMD uses all. Leave `devices` out, or show PJRT fewer: by CPU_NUM_DEVICES, or by "
            "TPU_VISIBLE_CHIPS on a TPU."
        )
    return None


def connect_program(
    word: str,
    world: World,
    precision: Precision,
    degrees: Mapping[str, int],
    data_axes: tuple[str, ...],
) -> Runtime:
    """Switch on SPMD in this process, irrevocably. Batches are sharded along `data_axes` of a mesh of these degrees.

    Raises: RuntimeError: the process has used a device already.
    """
    import torch_xla
    import torch_xla.runtime as xr

    from fabric.launchers.xla_internals import runtime_is_initialized

    if not xr.is_spmd():
        if runtime_is_initialized():
            raise RuntimeError(
                f"This process has used an XLA device already, and `strategy={word!r}` must be set in XLA "
                "before that. Make the `Fabric`, and launch, before the first tensor on 'xla'."
            )
        xr.use_spmd()
    device = torch_xla.device()
    seed_device()
    carry = partial(cut_batches, degrees, data_axes)
    return open_runtime(world, [device], SingleDeviceCollective(), precision, carry=carry)


def mesh_of_devices(degrees: Mapping[str, int]) -> Any:
    """A `torch_xla.distributed.spmd.Mesh` of all devices, which are consecutive along the last axis."""
    import numpy
    import torch_xla.distributed.spmd as spmd

    return spmd.Mesh(numpy.arange(math.prod(degrees.values())), tuple(degrees.values()), tuple(degrees))


def prepare_program(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
    """Prepare a module whose parameters are on the device and marked. Optimizer state is sharded as they are."""
    undo = [_lay_states(optimizers), prepare_module(module, optimizers)]
    return replace(replica(runtime, module, optimizers, end=undo_all(undo)), state=XLAState(rank=0))


def prepare_program_optimizers(runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """The implementation of `Strategy.setup_optimizers`."""
    return undo_all([_lay_states(optimizers), prepare_optimizers(runtime, optimizers)])


def cut_batches(
    degrees: Mapping[str, int], axes: tuple[str, ...], batches: Iterator[Any], device: torch.device
) -> Iterator[Any]:
    """Yield the batches, each tensor sharded along its first dim over the axes, or replicated if not divisible."""
    import torch_xla.distributed.spmd as spmd

    mesh, parts = mesh_of_devices(degrees), math.prod(degrees[axis] for axis in axes)
    for batch in marked_batches(batches, device):
        for tensor in movables(batch):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] % parts == 0:
                spmd.mark_sharding(tensor, mesh, (axes, *(None,) * (tensor.ndim - 1)))
        yield batch


def is_marked(tensor: Tensor) -> bool:
    """Whether the tensor has a sharding, marked or propagated by XLA."""
    from fabric.launchers.xla_internals import sharding_of

    return bool(sharding_of(tensor))


def axes_of(tensor: Tensor, mesh: Any) -> frozenset[str]:
    """The axes of the mesh along which devices hold different parts of the tensor."""
    import numpy

    from fabric.launchers.xla_internals import sharding_of

    match = _TILES.match(sharding_of(tensor))
    if match is None:
        return frozenset()
    tiles, devices = (numpy.array([int(number) for number in numbers.split(",")]) for numbers in match.groups())
    copies = tiles[-1] if "last_tile_dim_replicate" in match.string else 1
    part_of = {device: index // copies for index, device in enumerate(devices.tolist())}
    parts = numpy.vectorize(part_of.__getitem__)(mesh.get_logical_mesh())
    return frozenset(axis for dim, axis in enumerate(mesh.axis_names) if (parts != parts.take([0], dim)).any())


_TILES = re.compile(r"\{devices=\[([\d,]+)\]([\d,]+)")
"""XLA's text of a sharding: the number of tiles of each dim, then the devices of each tile. If several devices have
replicas of a tile, these are one more dim, the last."""


def _lay_states(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Shard optimizer state as its parameters after each step. Returns a function that removes the hooks."""
    handles = [optimizer.register_step_post_hook(_lay_state) for optimizer in optimizers]
    return undo_all([handle.remove for handle in handles])


def _lay_state(optimizer: Optimizer, *_: Any) -> None:
    from fabric.launchers.xla_internals import native

    for parameter, entries in optimizer.state.items():
        alike = [v for v in entries.values() if isinstance(v, Tensor) and v.shape == parameter.shape]
        for value in alike:
            if value.device == parameter.device and is_marked(parameter) and not is_marked(value):
                native._xla_mark_sharding(value, native._get_xla_op_sharding(parameter))
