"""Plain and sharded tensors (`DTensor`), and the state of sharded modules and optimizers.

The only file that gathers shards into full tensors and shards full tensors. torch's DTensor is imported only when a
tensor has a class of its own, so runs without shards do not pay for the import.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.chunk import Chunk
from fabric.strategies.checkpoint.chunk import whole as whole_chunk
from fabric.strategies.checkpoint.in_place import converts, is_extra_state
from fabric.strategies.checkpoint.optimizer_states import by_saved_index, map_state
from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.checkpoint.stored import Stored, in_memory
from fabric.strategies.checkpoint.tensor_shards import TensorShards
from fabric.strategies.gradients.in_shards import InShards
from fabric.strategies.sharding.flat_shards import plain_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


_FSDP = "torch.distributed.fsdp"


def as_sharded(tensor: Any) -> DTensor | None:
    """The tensor if it is a DTensor; None if it is plain."""
    if not isinstance(tensor, Tensor) or type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor. Shares its memory. Empty for a placeholder of what is on other ranks."""
    if isinstance(tensor, InShards):
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor = plain_shard(tensor)
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def user_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module, of which `fully_shard` makes a subclass with a new name."""
    return next(each for each in type(module).__mro__ if not each.__module__.startswith(_FSDP))


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on this rank. Ranks: all that hold a shard of it."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return tensor
    # A shard that was offloaded to the CPU is sent over the devices' own network.
    return put_together(cast("DTensor", on_mesh(sharded.detach(), sharded.device_mesh)))


def on_mesh(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor on the mesh's kind of device. One that is there stays: in a thread, the current device is another."""
    return tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)


def put_together(sharded: DTensor) -> Tensor:
    """`full_tensor()`, one axis of the mesh at a time: for all at once torch logs a warning on every rank (2.13)."""
    from torch.distributed.tensor import Replicate

    placements = list(sharded.placements)
    # The last sharding is undone first: strided shards, for which `is_shard()` is False, and then the later axes.
    for axis in sorted(range(len(placements)), key=lambda axis: (placements[axis].is_shard(), -axis)):
        placements[axis] = Replicate()
        sharded = sharded.redistribute(placements=placements)
    together: Tensor = sharded.to_local()
    return together


def own_part(copy: Tensor, sharded: DTensor) -> Tensor:
    """The part of a gathered copy that this rank holds as its shard. Shares the copy's memory. `copy`: plain, or
    sharded over the mesh's other axes."""
    chunk, within = _local_chunk(sharded), as_sharded(copy)
    offsets = (0,) * sharded.ndim if within is None else _local_chunk(within).offsets
    places = zip(chunk.offsets, offsets, chunk.shape, strict=True)
    return local_part(copy.detach())[tuple(slice(at - first, at - first + size) for at, first, size in places)]


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a full tensor, with the layout of `like`. No communication: every rank has the full
    tensor."""
    sharded = as_sharded(like)
    if sharded is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    made = distribute_tensor(tensor.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)
    return made.to(like.device).clone()  # a copy: a view would keep the whole alive


def shard_state(name: str, value: Any, parameter: Tensor, existing: Any = None) -> Any:
    """Shard one entry of an optimizer's state like its parameter.

    `existing`: the optimizer's present value, if any. Raises ValueError if neither determines the layout.
    """
    if not isinstance(value, Tensor) or as_sharded(value) is not None or as_sharded(parameter) is None:
        return value
    if value.shape == parameter.shape:
        return shard_like(value, parameter)
    if as_sharded(existing) is not None and existing.shape == value.shape:
        return shard_like(value, existing)
    if value.numel() == 1:  # a step count
        return value
    raise ValueError(
        f"The optimizer's state {name!r} has shape {tuple(value.shape)}, and its parameter, which lies in shards, "
        f"{tuple(parameter.shape)}: how to cut it is not known. Use an optimizer whose state has its parameters' shape."
    )


# Note [Whole states without torch.distributed.checkpoint.state_dict]
# Its `get_optimizer_state_dict(full_state_dict=True)` (torch 2.13) differs from `optimizer.state_dict()`: parameters
# are named instead of numbered, so plain PyTorch cannot load it; for an optimizer that has not stepped, it steps it;
# and it raises KeyError for a parameter that is in no module. `get_model_state_dict` drops `_metadata`, the versions of
# modules.


@final
class ShardedState(StateAccess):
    """Sharded states: reading gathers one tensor at a time, and keeps it on rank 0, on the CPU."""

    def __init__(self, rank: int) -> None:
        self.keeps = rank == 0

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        state = module.state_dict()
        for name, value in state.items():
            state[name] = self._gathered(value)
        return state if self.keeps else {}

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        targets = module.state_dict()
        state = copy(content)
        fill = not converts(module)
        for name, value in content.items():  # torch reports wrong shapes, all at once
            target = targets.get(name)
            if is_extra_state(name):
                state[name] = in_memory(value)
            else:
                state[name] = target if fill and _fill(target, value) else _stored_like(value, target)
        module.load_state_dict(state, strict=strict)

    def load_module(self, module: nn.Module, content: Any, *, strict: bool) -> None:
        self.write_module(module, content, strict=strict)

    def read_module_shards(self, module: nn.Module) -> dict[str, Any]:
        state = module.state_dict(keep_vars=True)  # `detach` of a DTensor costs ten times as much as `to_local`
        holders = cache(_holders)
        for name, value in state.items():
            state[name] = tensor_shards(value.detach() if type(value) is nn.Parameter else value, holders)
        return state

    def read_optimizer_shards(self, optimizer: Optimizer) -> dict[str, Any]:
        holders = cache(_holders)
        return map_state(optimizer.state_dict(), lambda index, name, value: tensor_shards(value, holders))

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        by_index = by_saved_index(optimizer, content)

        def filled(index: Any, name: str, value: Any) -> Any:
            parameter: Any = by_index.get(index)
            return _filled(value, parameter, optimizer.state.get(parameter, {}).get(name))

        states = map_state(content, filled)["state"]
        self.write_optimizer(optimizer, {**in_memory({**content, "state": {}}), "state": states})

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        content = map_state(optimizer.state_dict(), lambda index, name, value: self._gathered(value))
        return content if self.keeps else {}

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        by_index = by_saved_index(optimizer, content)

        def laid_out(index: Any, name: str, value: Any) -> Any:
            if index not in by_index:
                return value
            parameter = by_index[index]
            return shard_state(name, value, parameter, optimizer.state.get(parameter, {}).get(name))

        optimizer.load_state_dict(map_state(content, laid_out))

    def _gathered(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        gathered = whole(value)
        return gathered.detach().to("cpu") if self.keeps else torch.empty(0)


def tensor_shards(value: Any, holders: Callable[[DeviceMesh, tuple[Placement, ...]], tuple[int, ...]]) -> Any:
    """A DTensor as `TensorShards`; other values unchanged. `holders`: `_holders`, cached."""
    sharded = as_sharded(value)
    if sharded is None:
        return value
    chunk = _local_chunk(sharded)
    with torch.no_grad():
        local = local_part(sharded).detach()
    assert tuple(local.shape) == chunk.shape, f"{tuple(local.shape)} is not {chunk}"
    shards = ((chunk, local),) if local.numel() else ()
    return TensorShards(
        tuple(sharded.shape), sharded.dtype, shards, holders(sharded.device_mesh, tuple(sharded.placements))
    )


def _holders(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """The ranks that hold the same chunk as this one. `DeviceMesh.mesh` costs as much as copying 1 MB."""
    here = mesh.get_coordinate()
    assert here is not None
    same = tuple(slice(None) if each.is_replicate() else at for each, at in zip(placements, here, strict=True))
    return tuple(sorted(mesh.mesh[same].reshape(-1).tolist()))


def _local_chunk(sharded: DTensor) -> Chunk:
    """The chunk of the tensor that this rank holds."""
    mesh, placements = sharded.device_mesh, sharded.placements
    here = mesh.get_coordinate()
    assert here is not None
    offsets, shape = [0] * sharded.ndim, list(sharded.shape)
    # `fully_shard` of a tensor that is sharded already makes a placement whose `is_shard` is False: it shards last.
    cuts = sorted(
        (axis for axis, each in enumerate(placements) if not each.is_replicate()),
        key=lambda axis: (not placements[axis].is_shard(), axis),
    )
    for axis in cuts:
        dim = placements[axis].dim  # type: ignore[attr-defined]
        size = -(-shape[dim] // mesh.size(axis))  # as `torch.chunk` splits
        start = min(here[axis] * size, shape[dim])
        offsets[dim] += start
        shape[dim] = min(size, shape[dim] - start)
    return Chunk(tuple(offsets), tuple(shape))


def _stored_like(value: Any, like: Any, *, keep: bool = False) -> Any:
    """The part of a stored tensor that this rank needs: the layout of `like`, if that has its shape. To be kept, or
    copied from."""
    sharded = as_sharded(like)
    if not isinstance(value, Stored):  # from a file that was read as a whole
        fits = sharded is not None and isinstance(value, Tensor) and value.shape == sharded.shape
        return shard_like(value, like) if fits and as_sharded(value) is None else value
    read = value.kept if keep else value.part
    if sharded is None or tuple(sharded.shape) != value.shape:
        return read(whole_chunk(value.shape))
    from torch.distributed.tensor import DTensor

    local = read(_local_chunk(sharded)).to(local_part(like).device)
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _fill(target: Any, value: Any) -> bool:
    """Fill the local part of a DTensor from a file, or map it. Returns whether it fits."""
    own = as_sharded(target)
    if own is None or not isinstance(value, Stored) or (tuple(own.shape), own.dtype) != (value.shape, value.dtype):
        return False
    with torch.no_grad():  # `detach` of a DTensor costs ten times as much
        local = local_part(own)
    if not local.is_contiguous():
        return False
    value.fill(local, _local_chunk(own))
    return True


def _filled(value: Any, parameter: Any, existing: Any) -> Any:
    """An entry of an optimizer's state: `existing`, filled with the stored values, if shape, dtype and layout match.

    A new tensor otherwise, because an optimizer keeps the tensors of the state that it loads.
    """
    own = as_sharded(existing)
    if own is not None and _has_layout_of(own, parameter) and _fill(existing, value):
        return existing
    found = _stored_like(value, parameter, keep=True)
    return found.clone() if isinstance(found, Tensor) and not isinstance(value, Stored) else found


def _has_layout_of(tensor: DTensor, like: Any) -> bool:
    other = as_sharded(like)
    return other is not None and (tensor.device_mesh, tensor.placements) == (other.device_mesh, other.placements)
