"""The tensors in nested containers by path, in the same order on every rank. Knows no collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fabric.strategies.tensors.nests import opened


def map_tensors(function: Callable[[str, Tensor], Any], nest: Any, path: str = "data") -> Any:
    """Apply `function(path, tensor)` to each tensor, and return the results in the same containers.

    Containers are those of `nests.opened`; None stays. A Python number becomes a CPU tensor of the
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
        place: map_tensors(function, members[place], f"{path}{_STEPS[kind].format(names[place])}") for place in order
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
