"""Load tensors of a checkpoint directly into the memory of a module or an optimizer, or map them.

Allocating memory for a load costs more time than the copy, because its pages are touched for the first time. torch then
loads the result of `filled_module` or `filled_optimizer` like any other state, with its checks and hooks; copying the
module's own tensors to themselves costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.load_hooks import has_converting_hook
from fabric.strategies.checkpoint.stored import Stored, in_memory
from fabric.strategies.tensors.chunk import whole


def filled_module(module: nn.Module, content: Any) -> Any:
    """`content` with the module's own tensors, filled, where shapes match. The others are mapped."""
    if not isinstance(content, dict) or converts(module):
        return mapped_module(content)
    own = module.state_dict(keep_vars=True)
    state = copy(content)  # keeps its class and attributes: torch stores `_metadata` on the state of a module
    filled = dict[int, Hashable]()
    for name, value in content.items():
        target: Any = own.get(name)
        if isinstance(value, Stored) and _is_plain(target) and tuple(target.shape) == value.shape:
            if filled.get(id(target)) != value.location:  # tied tensors are read once
                value.fill(target, whole(value.shape))
            state[name], filled[id(target)] = target, value.location
        else:
            state[name] = mapped_entry(name, value)
    return state


def mapped_module(content: Any) -> Any:
    """The state of a module with its tensors mapped, for torch to copy from."""
    if not isinstance(content, dict):
        return in_memory(content, mapped=True)
    state = copy(content)
    for name, value in content.items():
        state[name] = mapped_entry(name, value)
    return state


def mapped_entry(name: str, value: Any) -> Any:
    """One entry of the state of a module, mapped if it is copied from; extra states are kept by the module."""
    return in_memory(value, mapped=not is_extra_state(name))


def is_extra_state(name: str) -> bool:
    """Whether the entry is what a submodule's `get_extra_state` returned, of any type that can be saved."""
    return name.rpartition(".")[2] == "_extra_state"


def filled_optimizer(optimizer: Optimizer, content: Any, *, mapped: bool = False) -> Any:
    """`content` with the tensors of the optimizer's state, filled, where shapes and dtypes match.

    The others are in new memory, or (`mapped`) mapped, to be copied by the caller.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in content["param_groups"] for index in group["params"]]
    existing = {index: optimizer.state.get(each, {}) for index, each in zip(indices, parameters, strict=False)}
    filled = set[int]()

    def fill(value: Any, target: Any) -> Any:
        if isinstance(value, Stored) and _is_same_kind(target, value) and target.data_ptr() not in filled:
            value.fill(target, whole(value.shape))
            filled.add(target.data_ptr())  # which is another one if the file is mapped
            return target
        return in_memory(value, mapped=mapped)

    states = {
        index: {name: fill(value, existing.get(index, {}).get(name)) for name, value in entries.items()}
        if isinstance(entries, dict)
        else in_memory(entries)
        for index, entries in content["state"].items()
    }
    return {**in_memory({**content, "state": {}}), "state": states}


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _is_same_kind(tensor: Any, stored: Stored) -> bool:
    """Whether an optimizer that loads the stored tensor would hold one like this."""
    return (
        _is_plain(tensor)
        and (tuple(tensor.shape), tensor.dtype) == (stored.shape, stored.dtype)
        and tensor.is_contiguous()
    )


def converts(module: nn.Module) -> bool:
    """Whether a submodule may convert a state before it is loaded, as those that read older checkpoints do."""
    return any(
        has_converting_hook(part)
        or (
            type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
            and not type(part).__module__.startswith("torch.nn.modules")
        )
        for part in module.modules()
    )
