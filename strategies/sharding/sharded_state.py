"""The state of sharded modules and optimizers: read whole or in shards, and loaded in the present layout."""

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import StateAccess, by_saved_index, converts, map_state
from fabric.strategies.checkpoint.tensors import Stored, TensorShards, in_memory, is_extra_state
from fabric.strategies.tensors.chunk import whole as whole_chunk
from fabric.strategies.tensors.dtensor import as_sharded, local_chunk, local_part, shard_like
from fabric.strategies.tensors.wrapper_subclass import Wrapped, is_wrapped, plain_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def shard_state(name: str, value: Any, parameter: Tensor, existing: Any = None) -> Any:
    """Shard one entry of an optimizer's state like its parameter.

    `existing`: the optimizer's present value, if any. Raises ValueError if neither determines the layout.
    """
    if not isinstance(value, Tensor) or as_sharded(value) is not None or as_sharded(parameter) is None:
        return value
    if value.shape == parameter.shape:
        return shard_like(_refuse_wrapped(value), parameter)
    if as_sharded(existing) is not None and existing.shape == value.shape:
        return shard_like(_refuse_wrapped(value), existing)
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
    """The state of DTensors."""

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

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        state = plain_state(module, keep_vars=True)  # `detach` of a DTensor costs ten times as much as `to_local`
        holders = cache(_holders)
        for name, value in state.items():
            state[name] = tensor_shards(value.detach() if type(value) is nn.Parameter else value, holders)
        return state

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        holders = cache(_holders)
        return map_state(optimizer.state_dict(), lambda index, name, value: tensor_shards(value, holders))

    def load_optimizer(self, optimizer: Optimizer, content: Any) -> None:
        by_index = by_saved_index(optimizer, content)

        def kept(index: Any, name: str, value: Any) -> Any:  # a copy, because an optimizer keeps what it loads
            found = _stored_like(value, by_index.get(index), keep=True)
            is_new = isinstance(value, (Stored, Wrapped)) or is_wrapped(value)
            return found.clone() if isinstance(found, Tensor) and not is_new else found

        states = map_state(content, kept)["state"]
        self.write_optimizer(optimizer, {**in_memory({**content, "state": {}}), "state": states})

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        by_index = by_saved_index(optimizer, content)

        def laid_out(index: Any, name: str, value: Any) -> Any:
            if index not in by_index:
                return value
            parameter = by_index[index]
            return shard_state(name, value, parameter, optimizer.state.get(parameter, {}).get(name))

        optimizer.load_state_dict(map_state(content, laid_out))


def tensor_shards(value: Any, holders: "Callable[[DeviceMesh, tuple[Placement, ...]], tuple[int, ...]]") -> Any:
    """A DTensor as `TensorShards`; other values unchanged. `holders`: `_holders`, cached."""
    sharded = as_sharded(value)
    if sharded is None:
        return value
    chunk = local_chunk(sharded)
    with torch.no_grad():
        local = _refuse_wrapped(local_part(sharded)).detach()
    assert tuple(local.shape) == chunk.shape, f"{tuple(local.shape)} is not {chunk}"
    shards = ((chunk, local),) if local.numel() else ()
    return TensorShards(
        tuple(sharded.shape), sharded.dtype, shards, holders(sharded.device_mesh, tuple(sharded.placements))
    )


def _holders(mesh: "DeviceMesh", placements: "tuple[Placement, ...]") -> tuple[int, ...]:
    """The ranks that hold the same chunk as this one. `DeviceMesh.mesh` costs as much as copying 1 MB."""
    here = mesh.get_coordinate()
    assert here is not None
    same = tuple(slice(None) if each.is_replicate() else at for each, at in zip(placements, here, strict=True))
    return tuple(sorted(mesh.mesh[same].reshape(-1).tolist()))


def _stored_like(value: Any, like: Any, *, keep: bool = False) -> Any:
    """The part of a stored tensor that this rank needs: the layout of `like`, if that has its shape. To be kept, or
    copied from."""
    sharded = as_sharded(like)
    if not isinstance(value, Stored):  # from a file that was read as a whole
        value = in_memory(value)
        fits = sharded is not None and isinstance(value, Tensor) and value.shape == sharded.shape
        return shard_like(_refuse_wrapped(value), like) if fits and as_sharded(value) is None else value
    read = value.kept if keep else value.part
    if sharded is None or tuple(sharded.shape) != value.shape:
        return read(whole_chunk(value.shape))
    from torch.distributed.tensor import DTensor

    local = read(local_chunk(sharded)).to(local_part(like).device)
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _refuse_wrapped(value: Tensor) -> Tensor:
    """The value. Raises ValueError if it is wrapped: shards of it may have cut its blocks."""
    if is_wrapped(value):
        raise ValueError(_WRAPPED.format(kind=type(value).__name__))
    return value


_WRAPPED = (
    "An optimizer has states of the class `{kind}`, which knows no shards, and its parameters are in shards. Write "
    "`optimizer.updates_each = 'parameter'` before `fabric.setup`: then each parameter is stepped whole by one rank."
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
    value.fill(local, local_chunk(own))
    return True
