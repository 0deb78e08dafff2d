"""Nested containers of tensors (batches, arguments): traversal, and reconstruction with the same types.

Written here because torch's traversal (`torch.utils._pytree`) is private, knows dataclasses and mappings only if they
are registered, and rebuilds every container. Knows no device and no dtype.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_NO_CONTAINERS = (int, float, complex, str, bytes, type(None), type)


@runtime_checkable
class NamedFields(Protocol):
    """A named tuple, which is constructed from its fields and not from one iterable."""

    _fields: tuple[str, ...]


Container: TypeAlias = tuple[Literal["key", "index", "field"], Sequence[Any], list[Any], Callable[[list[Any]], Any]]
"""The kind of names, the names, the members, and a function that makes such a container of other members."""


def map_leaves(function: Callable[[Any], Any], nest: Any, *, is_leaf: Callable[[Any], bool], keep: bool = False) -> Any:
    """Apply `function` to each leaf, in containers of the same types; `nest` itself is not changed.

    Containers are those that `opened` knows. `is_leaf`: what is not traversed. `keep`: a container in which nothing
    changed is returned itself, so that later writes into it remain visible to the caller.
    """
    container = None if is_leaf(nest) else opened(nest)
    if container is None:
        return function(nest)
    _, _, members, fill = container
    items = [map_leaves(function, member, is_leaf=is_leaf, keep=keep) for member in members]
    return nest if keep and all(one is other for one, other in zip(members, items, strict=True)) else fill(items)


def leaves_in(nest: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The leaves in nested containers for which `is_leaf` is true, in the order of the containers."""
    found: list[Any] = []

    def collect(leaf: Any) -> Any:
        if is_leaf(leaf):
            found.append(leaf)
        return leaf

    map_leaves(collect, nest, is_leaf=is_leaf, keep=True)
    return found


def tensors_in(nest: Any) -> list[Tensor]:
    """The tensors in nested containers, in the order of the containers."""
    return leaves_in(nest, is_tensor)


def map_only_tensors(function: Callable[[Tensor], Any], nest: Any, *, keep: bool = False) -> Any:
    """`map_leaves` that applies `function` to tensors only."""
    return map_leaves(
        lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, nest, is_leaf=is_tensor, keep=keep
    )


def is_tensor(leaf: Any) -> bool:
    """For `is_leaf`."""
    return isinstance(leaf, Tensor)


def opened(nest: Any) -> Container | None:
    """The members of a container, and a function that rebuilds it; None if `nest` is no container.

    Containers are mappings, lists, tuples, named tuples, dataclasses, instances of attrs classes, and types registered
    with torch's pytree.
    """
    if isinstance(nest, _NO_CONTAINERS):
        return None
    if isinstance(nest, (tuple, list)):
        return "index", range(len(nest)), list(nest), partial(_sequence, nest)
    if isinstance(nest, Mapping):
        return "key", list(nest), list(nest.values()), partial(_mapping, nest)
    names = fields_of(nest)
    if names is not None:
        return "field", names, [getattr(nest, name) for name in names], partial(_replaced, nest, names)
    leaves, spec = tree_flatten(nest)
    if len(leaves) == 1 and leaves[0] is nest:
        return None
    return "index", range(len(leaves)), leaves, partial(tree_unflatten, treespec=spec)


def fields_of(obj: Any) -> list[str] | None:
    """The field names of a dataclass or an attrs class; None for anything else."""
    if dataclasses.is_dataclass(obj):
        return [field.name for field in dataclasses.fields(obj)]
    of_attrs = getattr(type(obj), "__attrs_attrs__", None)
    return None if of_attrs is None else [field.name for field in of_attrs]


def _sequence(like: Any, items: list[Any]) -> Any:
    if type(like) is tuple:
        return tuple(items)
    if isinstance(like, tuple):
        return type(like)(*items) if isinstance(like, NamedFields) else type(like)(items)
    duplicate = copy.copy(like)
    duplicate[:] = items
    return duplicate


def _mapping(like: Any, values: list[Any]) -> Any:
    if not isinstance(like, MutableMapping):
        return type(like)(dict(zip(like, values, strict=True)))
    duplicate = copy.copy(like)  # keeps a default factory and attributes
    if getattr(like, "__dict__", None) is like:  # its keys are its attributes
        duplicate.__dict__ = duplicate  # type: ignore[assignment]
    for key, value in zip(like, values, strict=True):
        duplicate[key] = value
    return duplicate


def _replaced(like: Any, names: list[str], values: list[Any]) -> Any:
    duplicate = copy.copy(like)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(duplicate, name, value)  # also if it is frozen
    return duplicate


def map_by_path(function: Callable[[str, Tensor], Any], nest: Any, path: str = "data") -> Any:
    """Apply `function(path, tensor)` to each tensor, and return the results in the same containers.

    Containers are those of `opened`; None stays. A Python number becomes a CPU tensor of the
    dtype that holds it exactly: int64, float64, bool, complex128. Mappings are traversed in the order of their keys'
    `repr`, so that insertion order may differ between ranks.
    Raises: TypeError: anything else, with its path.
    """
    if isinstance(nest, Tensor):
        return function(path, nest)
    if nest is None:
        return None
    if isinstance(nest, (bool, int, float, complex)):
        return function(path, _number(nest, path))
    container = opened(nest)
    if container is None:
        raise TypeError(
            f"`{path}` is a `{type(nest).__name__}`, which is neither a tensor, a number, None, nor a dict, list, "
            "tuple or dataclass of those. Leave it out, or send it with `broadcast` or `all_gather_object`, which take "
            "any object."
        )
    kind, names, members, fill = container
    order = sorted(range(len(members)), key=lambda place: repr(names[place])) if kind == "key" else range(len(members))
    mapped = {
        place: map_by_path(function, members[place], f"{path}{_STEPS[kind].format(names[place])}") for place in order
    }
    try:
        return fill([mapped[place] for place in range(len(members))])
    except TypeError as error:
        raise TypeError(
            f"`{path}` is a `{type(nest).__name__}`, which cannot be rebuilt with other members ({error}). Pass a "
            "dict, list, tuple or dataclass instead."
        ) from error


_STEPS = {"key": "[{!r}]", "index": "[{}]", "field": ".{}"}


def _number(number: bool | int | float | complex, path: str) -> Tensor:
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError(f"`{path}` is {number}, which does not fit into 64 bits. Pass it as a float, or in two parts.")
    if isinstance(number, float):
        return torch.tensor(number, dtype=torch.float64, device="cpu")
    return torch.tensor(number, dtype=torch.complex128 if isinstance(number, complex) else None, device="cpu")
