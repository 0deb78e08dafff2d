"""A whole state in memory: plain CPU tensors that share no memory with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.saving import memory_of
from fabric.strategies.tensors.nests import map_only_tensors, tensors_in
from fabric.strategies.tensors.wrapped import is_wrapped, on_cpu, plain_tensors

_SMALL_BYTES = 2**20
"""Tensors up to this size are always copied."""


def snapshot(content: Any, owners: Iterable[nn.Module | Optimizer], local: Callable[[Tensor], Tensor]) -> Any:
    """A nest of plain containers with each tensor on the CPU, sharing no memory with `owners`; tied tensors stay tied.

    Tensors that a strategy gathered for this call are not copied again. `local`: returns this rank's part of a tensor.
    """
    held = (local(tensor) for owner in owners for tensor in _tensors_of(owner))
    plain = (each for tensor in held for each in plain_tensors(tensor).values())
    live = {_storage(tensor) for tensor in plain if tensor.device.type == "cpu"}  # XLA's storages have no address
    known: dict[Any, tuple[Tensor, Tensor]] = {}

    def copied(tensor: Tensor) -> Tensor:
        if is_wrapped(tensor):
            return on_cpu(tensor)
        if tensor.device.type == "cpu" and tensor.nbytes > _SMALL_BYTES and _storage(tensor) not in live:
            return tensor.detach()
        key = memory_of(tensor)
        if key not in known:  # the original is kept, so that no other tensor gets its memory
            own = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            known[key] = (tensor, own)
        return known[key][1]

    return map_only_tensors(copied, content)


def _tensors_of(owner: nn.Module | Optimizer) -> list[Tensor]:
    if isinstance(owner, nn.Module):
        return [*owner.parameters(), *owner.buffers()]
    return tensors_in([list(owner.state.values()), owner.param_groups])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
