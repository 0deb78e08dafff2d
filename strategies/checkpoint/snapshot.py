"""A whole state in memory: plain CPU tensors that share no memory with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.saving import memory_of

_SMALL_BYTES = 2**20
"""Tensors up to this size are always copied."""


def snapshot(content: Any, owners: Iterable[nn.Module | Optimizer], local: Callable[[Tensor], Tensor]) -> Any:
    """A nest of plain containers with each tensor on the CPU, sharing no memory with `owners`; tied tensors stay tied.

    Tensors that a strategy gathered for this call are not copied again. `local`: returns this rank's part of a tensor.
    """
    held = (local(tensor) for owner in owners for tensor in _tensors_of(owner))
    live = {_storage(tensor) for tensor in held if tensor.device.type == "cpu"}  # XLA's storages have no address
    return _copied(content, live, {})


def _copied(content: Any, live: set[int], known: dict[Any, tuple[Tensor, Tensor]]) -> Any:
    if isinstance(content, Tensor):
        if content.device.type == "cpu" and content.nbytes > _SMALL_BYTES and _storage(content) not in live:
            return content.detach()
        key = memory_of(content)
        if key not in known:  # the original is kept, so that no other tensor gets its memory
            own = content.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            known[key] = (content, own)
        return known[key][1]
    if isinstance(content, dict):
        made = copy(content)  # keeps its class and attributes: torch stores `_metadata` on the state of a module
        for key, entry in content.items():
            made[key] = _copied(entry, live, known)
        return made
    if type(content) in (list, tuple):
        return type(content)(_copied(entry, live, known) for entry in content)
    return content


def _tensors_of(owner: nn.Module | Optimizer) -> Iterator[Tensor]:
    if isinstance(owner, nn.Module):
        yield from owner.parameters()
        yield from owner.buffers()
    else:
        yield from _within([*owner.state.values(), *owner.param_groups])


def _within(nest: Iterable[Any]) -> Iterator[Tensor]:
    for each in nest:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (dict, list, tuple)):
            yield from _within(each.values() if isinstance(each, dict) else each)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
