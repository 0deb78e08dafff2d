"""Batches and arguments, whatever they are nested in: containers taken apart, and put together again of the same types.

A traversal of our own, because torch's (`torch.utils._pytree`) is private, knows dataclasses and mappings only where
somebody registered them, and makes every container anew. Knows no device and no dtype.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

from torch.utils._pytree import tree_flatten, tree_unflatten

_ATOMS = (int, float, complex, str, bytes, type(None))


@runtime_checkable
class NamedFields(Protocol):
    """A named tuple, which is made from its fields and not from one iterable."""

    _fields: tuple[str, ...]


def map_leaves(function: Callable[[Any], Any], nest: Any, *, is_leaf: Callable[[Any], bool], keep: bool = False) -> Any:
    """The nest with `function(leaf)` in place of each leaf, in containers of the same types; the nest itself is left.

    Containers are mappings, lists, tuples, named tuples, dataclasses, instances of attrs classes, and what somebody
    registered with torch's pytree. What `is_leaf` names is not looked into.
    `keep`: a container in which nothing changed is given back itself, so that what is written into it stays there.
    """

    def walk(one: Any) -> Any:
        return map_leaves(function, one, is_leaf=is_leaf, keep=keep)

    if is_leaf(nest) or isinstance(nest, _ATOMS):
        return function(nest)
    if isinstance(nest, (tuple, list)):
        items = [walk(item) for item in nest]
        return nest if keep and _unchanged(nest, items) else _sequence(nest, items)
    if isinstance(nest, Mapping):
        values = [walk(value) for value in nest.values()]
        return nest if keep and _unchanged(nest.values(), values) else _mapping(nest, values)
    if isinstance(nest, type):
        return function(nest)
    names = fields_of(nest)
    if names is not None:
        present = [getattr(nest, name) for name in names]
        items = [walk(value) for value in present]
        return nest if keep and _unchanged(present, items) else _replaced(nest, dict(zip(names, items, strict=True)))
    leaves, spec = tree_flatten(nest)
    if len(leaves) == 1 and leaves[0] is nest:
        return function(nest)
    items = [walk(leaf) for leaf in leaves]
    return nest if keep and _unchanged(leaves, items) else tree_unflatten(items, spec)


def fields_of(obj: Any) -> list[str] | None:
    """The names of the fields of a dataclass or of an attrs class that `obj` has; None where it is neither."""
    if dataclasses.is_dataclass(obj):
        return [field.name for field in dataclasses.fields(obj)]
    of_attrs = getattr(type(obj), "__attrs_attrs__", None)
    return None if of_attrs is None else [field.name for field in of_attrs]


def _unchanged(before: Any, after: list[Any]) -> bool:
    return all(one is other for one, other in zip(before, after, strict=True))


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
    duplicate = copy.copy(like)  # keeps what else it holds: a default factory, attributes
    for key, value in zip(like, values, strict=True):
        duplicate[key] = value
    return duplicate


def _replaced(like: Any, values: dict[str, Any]) -> Any:
    duplicate = copy.copy(like)
    for name, value in values.items():
        object.__setattr__(duplicate, name, value)  # also where it is frozen
    return duplicate
