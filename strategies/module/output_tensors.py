"""The tensors in the output of a forward, also where they are attributes of an object, such as a distribution.

Backends start their part of a backward where a gradient reaches an output, and look for tensors in lists, tuples,
dictionaries and dataclasses only: they find no tensor in a policy's `Categorical`, or in a `TensorDict`. So the
attributes of objects are searched, too. The tensors that a function or a generator holds cannot be found.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
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
"""The greatest depth of nested containers and objects that is searched. A linked list would exceed Python's own
limit."""


class OutputWithTensors(NamedTuple):
    """An output, and a list of the tensors in it that torch would not find."""

    output: Any
    tensors: list[Tensor]
    ids: list[int]
    """The tensors in the output itself: a backend may replace the tensors of the list."""


def tensors_requiring_grad(output: Any) -> list[Tensor]:
    """The tensors that require gradients in an output of a forward, each once."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    return [tensor for tensor, _ in _search(output, {}, is_found=True)]


def list_hidden_tensors(output: Any) -> Any:
    """The output as a backend of torch should see it: `OutputWithTensors` if torch would miss some tensors."""
    if isinstance(output, Tensor):
        return output
    hidden = [tensor for tensor, is_found in _search(output, {}, is_found=True) if not is_found]
    return OutputWithTensors(output, hidden, [id(each) for each in hidden]) if hidden else output


def restore_output(output: Any) -> Any:
    """The output that was exposed, with the tensors of the backend."""
    if not isinstance(output, OutputWithTensors):
        return output
    replaced = dict(zip(output.ids, output.tensors, strict=True))
    return replace_tensors(output.output, lambda tensor: replaced.get(id(tensor), tensor))


def replace_tensors(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The output with `function(tensor)` for each tensor, in copies of the containers and objects that hold one."""
    return function(output) if isinstance(output, Tensor) else _replace(output, function, {})


def _search(
    value: Any, visited: dict[int, Any], *, is_found: bool, depth: int = _DEPTH
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that require gradients, and whether torch finds them.

    `visited`: values by id, kept alive. `is_found`: whether torch searches this value.
    """
    if isinstance(value, _CLOSED) or id(value) in visited or depth == 0:
        return
    visited[id(value)] = value
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value, is_found
        return
    is_found = is_found and (isinstance(value, (list, tuple, dict)) or is_dataclass(value))
    container = opened(value)
    for member in () if container is None else container[2]:
        yield from _search(member, visited, is_found=is_found, depth=depth - 1)
    for _, member in _attributes(value):  # containers may have some, too
        yield from _search(member, visited, is_found=False, depth=depth - 1)


def _replace(
    value: Any, function: Callable[[Tensor], Tensor], done: dict[int, tuple[Any, Any]], depth: int = _DEPTH
) -> Any:
    """See `replace_tensors`. `done`: by id, each value, which is so kept alive, and its replacement."""
    if isinstance(value, _CLOSED) or depth == 0:
        return value
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, Tensor):
        replaced = function(value)
        done[id(replaced)] = replaced, replaced
        done[id(value)] = value, replaced
        return replaced
    done[id(value)] = value, value
    container = opened(value)
    if container is not None:
        _, _, members, fill = container
        items = [_replace(each, function, done, depth - 1) for each in members]
        if any(one is not other for one, other in zip(members, items, strict=True)):
            done[id(value)] = value, fill(items)
    replaced = done[id(value)][1]
    attributes = dict(_attributes(replaced))
    changed = {name: _replace(member, function, done, depth - 1) for name, member in attributes.items()}
    if any(changed[name] is not member for name, member in attributes.items()):
        if replaced is value:  # which the model may keep
            replaced = copy(value)
            done[id(value)] = value, replaced
        for name, member in changed.items():
            object.__setattr__(replaced, name, replaced if member is value else member)
    return replaced


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes that an object stores, in slots too, without its properties."""
    stored = list(getattr(value, "__dict__", {}).items())
    for owner in type(value).__mro__:
        if "__slots__" in vars(owner):
            names = [name for name, each in vars(owner).items() if isinstance(each, MemberDescriptorType)]
            stored += [(name, getattr(value, name)) for name in names if hasattr(value, name)]  # a slot may be unset
    return stored
