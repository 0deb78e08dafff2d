"""Tensors of other classes, made of plain ones (torchao's quantised tensors): taken apart, and put together again.

By `__tensor_flatten__` and `__tensor_unflatten__`, which torch documents for subclasses that wrap tensors. Classes are
found by their names among those that torch trusts (`torch.serialization.add_safe_globals`, which libraries call when
they are imported), so that reading a checkpoint runs no other code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """What a checkpoint has of such a tensor."""

    kind: str
    """The name of the class."""
    tensors: dict[str, Any]
    """By the names of attributes; a `TensorShards` for each of which other ranks hold parts."""
    context: Any
    size: list[int]
    stride: list[int]


def taken_apart(value: Any) -> Wrapped:
    """The tensors of a wrapper, and the rest. Raises: ValueError: torch does not trust its class."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    _trusted(kind)
    names, context = value.__tensor_flatten__()
    tensors = {name: getattr(value, name) for name in names}
    return Wrapped(kind=kind, tensors=tensors, context=context, size=list(value.size()), stride=list(value.stride()))


def put_together(whole: Wrapped) -> Tensor:
    """The wrapper around these tensors. Raises: ValueError: torch does not trust its class."""
    size, stride = torch.Size(whole.size), tuple(whole.stride)
    made: Tensor = _trusted(whole.kind).__tensor_unflatten__(whole.tensors, whole.context, size, stride)
    return made


def _trusted(kind: str) -> Any:
    for each in torch.serialization.get_safe_globals():
        if isinstance(each, type) and issubclass(each, Tensor) and f"{each.__module__}.{each.__qualname__}" == kind:
            return each
    raise ValueError(
        f"A tensor of the class `{kind}` is made by code of that class, which runs only if torch trusts it. Import the "
        "library that defines it, or call `torch.serialization.add_safe_globals([...])` with the class"
    )


def map_inner(function: Callable[[Tensor], Tensor], value: Any) -> Tensor:
    """The same wrapper around what `function` returns for each of its tensors."""
    names, context = value.__tensor_flatten__()
    inner = {name: function(getattr(value, name)) for name in names}
    made: Tensor = type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
    return made


def on_cpu(value: Any) -> Tensor:
    """A copy on the CPU, which shares no memory."""
    return map_inner(lambda inner: inner.detach().to("cpu", copy=True), value)
