"""Tensors that keep their values in other tensors, such as the quantised weights of torchao.

They follow PyTorch's protocol for wrapper subclasses (`__tensor_flatten__`). Collectives, digests and the states of
modules use their plain tensors; what shards parameters leaves frozen ones whole on each rank. An optimizer makes its
states in its first step, so that a checkpoint says how they are put together as well: by classes that torch trusts
(`torch.serialization.add_safe_globals`, which libraries call when they are imported), and by no other code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, final, runtime_checkable

import torch
from torch import Tensor, nn

from fabric.strategies.tensors.dtensor import as_sharded


@runtime_checkable
class WrapperSubclass(Protocol):
    """PyTorch's protocol, which DTensors and nested tensors follow, too."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]: ...


def is_wrapped(value: object) -> TypeGuard[Any]:
    """Whether this is a tensor whose values are in other tensors, and neither a DTensor nor nested."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return False
    return isinstance(value, WrapperSubclass) and not value.is_nested and as_sharded(value) is None


def plain_tensors(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """The tensors in which a wrapped tensor keeps its values, which share its memory; any other tensor itself.

    By name: "0.weight.qdata" within "0.weight".
    """
    if not is_wrapped(tensor):
        return {name: tensor}
    inner, _ = tensor.__tensor_flatten__()
    return {key: each for part in inner for key, each in plain_tensors(getattr(tensor, part), f"{name}.{part}").items()}


def plain_state(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The state dict of a module, with the plain tensors of those that are wrapped."""
    state: dict[str, Any] = module.state_dict(keep_vars=keep_vars)
    for name in [name for name, value in state.items() if is_wrapped(value)]:
        state.update(plain_tensors(state.pop(name).detach(), name))
    return state


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A wrapped tensor, flattened into its plain tensors."""

    kind: str
    """The name of its class."""
    tensors: dict[str, Any]
    """Its plain tensors by the names of attributes, or what stands for them; a `Wrapped` for each that is wrapped."""
    context: Any
    size: list[int]
    stride: list[int]


def flattened(tensor: Any) -> Any:
    """A wrapped tensor as `Wrapped`; any other value itself."""
    if not is_wrapped(tensor):
        return tensor
    names, context = tensor.__tensor_flatten__()
    tensors = {name: flattened(getattr(tensor, name)) for name in names}
    size, stride = list(tensor.size()), list(tensor.stride())
    return Wrapped(kind=name_of(type(tensor)), tensors=tensors, context=context, size=size, stride=stride)


def unflattened(whole: Any, read: Callable[[Any], Tensor]) -> Tensor:
    """The tensor around what `read` returns for each plain one. Raises: ValueError: torch does not trust its class."""
    if not isinstance(whole, Wrapped):
        return read(whole)
    inner = {name: unflattened(each, read) for name, each in whole.tensors.items()}
    size, stride = torch.Size(whole.size), tuple(whole.stride)
    made: Tensor = trusted(whole.kind).__tensor_unflatten__(inner, whole.context, size, stride)
    return made


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which shares no memory. Raises: ValueError: torch does not trust its class."""
    return unflattened(flattened(tensor), lambda plain: plain.detach().to("cpu", copy=True))


def trusted(kind: str) -> Any:
    """The class of this name. Raises: ValueError: torch does not trust it."""
    for each in torch.serialization.get_safe_globals():
        if isinstance(each, type) and name_of(each) == kind:
            return each
    raise ValueError(
        f"A value of the class `{kind}` is made by code of that class, which runs only if torch trusts it. Import the "
        "library that defines it, or call `torch.serialization.add_safe_globals([...])` with the class"
    )


def name_of(kind: type) -> str:
    """With its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def frozen_wrapped(module: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen parameters of a model that are wrapped, by name. Sharding would cut or flatten them."""
    return {name: each for name, each in module.named_parameters() if not each.requires_grad and is_wrapped(each)}


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or a buffer to a device, in place."""
    if not is_wrapped(tensor):
        tensor.data = tensor.data.to(device)
    elif tensor.device != device:  # `.data =` would leave its plain tensors where they are
        moved = tensor.detach().to(device)
        is_parameter = isinstance(tensor, nn.Parameter)
        made = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
