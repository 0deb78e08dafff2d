"""One program over all devices of a host: what `xla_fsdp` and `model_parallel` over XLA share.

XLA's SPMD (GSPMD: Xu et al., 2021, arXiv:2105.04663) cuts tensors along the axes of a mesh of devices, from marks on
them, and puts in the messages. There is one process and one rank, and every tensor looks whole: whatever is marked, the
numbers are those of one device. Marks say what lies where, and what it costs.
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
    """A sentence where the devices are not all those of one host. `word`: the strategy's."""
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
            "here, and the program is of all. Leave `devices` out, or show PJRT fewer: by CPU_NUM_DEVICES, or by "
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
    """Give this process to SPMD, for good. Batches are cut along `data_axes` of the mesh of these degrees.

    Raises: RuntimeError: it has used a device already, which can then be told of SPMD no more.
    """
    import torch_xla
    import torch_xla.runtime as xr

    from fabric.launchers.xla_internals import runtime_is_initialized

    if not xr.is_spmd():
        if runtime_is_initialized():
            raise RuntimeError(
                f"This process has used an XLA device already, and `strategy={word!r}` must be told to XLA "
                "before that. Make the `Fabric`, and launch, before the first tensor on 'xla'."
            )
        xr.use_spmd()
    device = torch_xla.device()
    seed_device()
    carry = partial(cut_batches, degrees, data_axes)
    return open_runtime(world, [device], SingleDeviceCollective(), precision, carry=carry)


def mesh_of_devices(degrees: Mapping[str, int]) -> Any:
    """A `torch_xla.distributed.spmd.Mesh` of all devices, in their order, the last axis fastest."""
    import numpy
    import torch_xla.distributed.spmd as spmd

    return spmd.Mesh(numpy.arange(math.prod(degrees.values())), tuple(degrees.values()), tuple(degrees))


def prepare_program(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
    """Prepare a module whose parameters are on the device, and marked; their optimizers' states will lie as they do."""
    undo = [_lay_states(optimizers), prepare_module(module, optimizers)]
    return replace(replica(runtime, module, optimizers, end=undo_all(undo)), state=XLAState(rank=0))


def prepare_program_optimizers(runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """What `Strategy.setup_optimizers` does."""
    return undo_all([_lay_states(optimizers), prepare_optimizers(runtime, optimizers)])


def cut_batches(
    degrees: Mapping[str, int], axes: tuple[str, ...], batches: Iterator[Any], device: torch.device
) -> Iterator[Any]:
    """The batches on the devices, each tensor cut along its first dim over the axes, or whole where it cannot be."""
    import torch_xla.distributed.spmd as spmd

    mesh, parts = mesh_of_devices(degrees), math.prod(degrees[axis] for axis in axes)
    for batch in marked_batches(batches, device):
        for tensor in movables(batch):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] % parts == 0:
                spmd.mark_sharding(tensor, mesh, (axes, *(None,) * (tensor.ndim - 1)))
        yield batch


def is_marked(tensor: Tensor) -> bool:
    """Whether it was said, or found by XLA, how the tensor lies."""
    from fabric.launchers.xla_internals import sharding_of

    return bool(sharding_of(tensor))


def axes_of(tensor: Tensor, mesh: Any) -> frozenset[str]:
    """The axes of the mesh along which devices hold different parts of the tensor."""
    import numpy

    from fabric.launchers.xla_internals import sharding_of

    said = _TILES.match(sharding_of(tensor))
    if said is None:
        return frozenset()
    tiles, devices = (numpy.array([int(number) for number in numbers.split(",")]) for numbers in said.groups())
    copies = tiles[-1] if "last_tile_dim_replicate" in said.string else 1
    part_of = {device: index // copies for index, device in enumerate(devices.tolist())}
    parts = numpy.vectorize(part_of.__getitem__)(mesh.get_logical_mesh())
    return frozenset(axis for dim, axis in enumerate(mesh.axis_names) if (parts != parts.take([0], dim)).any())


_TILES = re.compile(r"\{devices=\[([\d,]+)\]([\d,]+)")
"""How XLA writes it: into how many tiles each dim is cut, then the devices tile by tile. Where several devices have
copies of a tile, they are one more dim, the last."""


def _lay_states(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let each optimizer, once it has stepped, lay its state out as its parameters are. Returns what undoes it."""
    handles = [optimizer.register_step_post_hook(_lay_state) for optimizer in optimizers]
    return undo_all([handle.remove for handle in handles])


def _lay_state(optimizer: Optimizer, *_: Any) -> None:
    from fabric.launchers.xla_internals import native

    for parameter, entries in optimizer.state.items():
        alike = [v for v in entries.values() if isinstance(v, Tensor) and v.shape == parameter.shape]
        for value in alike:
            if value.device == parameter.device and is_marked(parameter) and not is_marked(value):
                native._xla_mark_sharding(value, native._get_xla_op_sharding(parameter))
