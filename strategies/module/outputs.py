"""The tensors in what a forward returns, also where they are attributes of an object, such as a distribution.

Backends start their part of a backward where a gradient reaches an output, and look for tensors in lists, tuples,
dictionaries and dataclasses only: they find none in a policy's `Categorical`, or in a `TensorDict`. So the attributes
of objects are searched, too. What a function or a generator holds cannot be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.tensors.nests import opened

_CLOSED = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    nn.Module,
    Optimizer,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)
"""Instances of these are not searched. The parameters of a module are no outputs."""


_DEPTH = 64
"""Of containers and objects within each other that are searched. A linked list would exceed Python's own limit."""


class Exposed(NamedTuple):
    """An output, and beside it the tensors in it that torch would not find."""

    output: Any
    tensors: list[Tensor]
    ids: list[int]
    """Those of the tensors in the output: a backend may replace the tensors of the list."""


def outputs_in(output: Any) -> list[Tensor]:
    """The tensors that require gradients in an output of a forward, each once."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    return [tensor for tensor, _ in _search(output, {}, is_found=True)]


def expose(output: Any) -> Any:
    """The output as a backend of torch should see it: an `Exposed`, if torch would not find all of its tensors."""
    if isinstance(output, Tensor):
        return output
    hidden = [tensor for tensor, is_found in _search(output, {}, is_found=True) if not is_found]
    return Exposed(output, hidden, [id(each) for each in hidden]) if hidden else output


def conceal(output: Any) -> Any:
    """The output that was exposed, with the tensors of the backend."""
    if not isinstance(output, Exposed):
        return output
    replaced = dict(zip(output.ids, output.tensors, strict=True))
    return _replace(output.output, replaced, {})


def _search(
    value: Any, visited: dict[int, Any], *, is_found: bool, depth: int = _DEPTH
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors, and whether torch finds them. `visited`: by id, kept alive. `is_found`: whether torch comes here."""
    if isinstance(value, _CLOSED) or id(value) in visited or depth == 0:
        return
    visited[id(value)] = value
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value, is_found
        return
    is_found = is_found and (isinstance(value, (list, tuple, dict)) or is_dataclass(value))
    container = opened(value)
    members = container[2] if container is not None else [each for _, each in _attributes(value)]
    for member in members:
        yield from _search(member, visited, is_found=is_found, depth=depth - 1)


def _replace(value: Any, replaced: Mapping[int, Tensor], done: dict[int, tuple[Any, Any]], depth: int = _DEPTH) -> Any:
    """The value with other tensors: containers are made anew, attributes of other objects are set.

    `done`: values and what replaces them, by id.
    """
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, _CLOSED) or depth == 0:
        return value
    if id(value) in done:
        return done[id(value)][1]
    done[id(value)] = value, value
    container = opened(value)
    if container is None:
        for name, member in _attributes(value):
            changed = _replace(member, replaced, done, depth - 1)
            if changed is not member:
                object.__setattr__(value, name, changed)
        return value
    _, _, members, fill = container
    items = [_replace(each, replaced, done, depth - 1) for each in members]
    if any(one is not other for one, other in zip(members, items, strict=True)):
        done[id(value)] = value, fill(items)
    return done[id(value)][1]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes that an object stores, without its properties."""
    return list(getattr(value, "__dict__", {}).items())
