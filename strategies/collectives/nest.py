"""Nests of tensors: the containers that a batch may be made of, taken apart and put together again.

A traversal of our own, because torch's (`torch.utils._pytree`) is private, orders a dict as it was filled (which may
differ between ranks), and takes dataclasses and mappings such as a tokenizer's batch for leaves. Knows no collective.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[str, Tensor], Any], nest: Any, path: str = "data") -> Any:
    """Give a nest of the same containers, with `function(path, tensor)` in place of each tensor.

    Containers are mappings, lists, tuples, named tuples and dataclasses; None stays. A Python number counts as a
    tensor on the CPU of the dtype that holds it exactly: int64, float64, bool, complex128. Mappings are walked in the
    order of their keys' `repr`, so that ranks need not have filled them in the same order.
    Raises: TypeError: anything else, with its path.
    """
    if isinstance(nest, Tensor):
        return function(path, nest)
    if nest is None:
        return None
    if isinstance(nest, (bool, int, float, complex)):
        return function(path, _number(nest, path))
    if isinstance(nest, Mapping):
        values = {key: map_tensors(function, nest[key], f"{path}[{key!r}]") for key in sorted(nest, key=repr)}
        return _mapping_like(nest, values, path)
    if isinstance(nest, (list, tuple)):
        items = [map_tensors(function, item, f"{path}[{index}]") for index, item in enumerate(nest)]
        return _sequence_like(nest, items, path)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        filled = copy.copy(nest)
        for field in dataclasses.fields(nest):
            value = map_tensors(function, getattr(nest, field.name), f"{path}.{field.name}")
            object.__setattr__(filled, field.name, value)  # also where it is frozen
        return filled
    raise TypeError(
        f"`{path}` is a `{type(nest).__name__}`, which is neither a tensor, a number, None, nor a dict, list, tuple or "
        "dataclass of those. Leave it out, or send it with `broadcast` or `all_gather_object`, which take any object."
    )


def _number(number: bool | int | float | complex, path: str) -> Tensor:
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError(f"`{path}` is {number}, which does not fit into 64 bits. Pass it as a float, or in two parts.")
    if isinstance(number, float):
        return torch.tensor(number, dtype=torch.float64, device="cpu")
    return torch.tensor(number, dtype=torch.complex128 if isinstance(number, complex) else None, device="cpu")


def _mapping_like(like: Mapping[Any, Any], values: dict[Any, Any], path: str) -> Any:
    if type(like) is dict:
        return {key: values[key] for key in like}
    if isinstance(like, MutableMapping):
        filled = copy.copy(like)  # keeps what else it holds: a default factory, attributes
        for key in like:
            filled[key] = values[key]
        return filled
    raise TypeError(f"`{path}` is a `{type(like).__name__}`, which cannot be filled anew. Pass `dict({path})`.")


def _sequence_like(like: list[Any] | tuple[Any, ...], items: list[Any], path: str) -> Any:
    if type(like) is list:
        return items
    if type(like) is tuple:
        return tuple(items)
    if isinstance(like, list):
        filled = copy.copy(like)
        filled[:] = items
        return filled
    make = getattr(type(like), "_make", None)  # a named tuple
    if make is None:
        raise TypeError(f"`{path}` is a `{type(like).__name__}`, which cannot be filled anew. Pass `tuple({path})`.")
    return make(items)
