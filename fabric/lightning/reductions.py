"""That library's reductions: names, torch's `ReduceOp`, and in-place results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fabric.strategies.collectives.collective import ReduceOp as Word
from fabric.strategies.tensors.paths import map_tensors

_WORDS: dict[str, Word] = {
    "avg": "mean",
    "max": "max",
    "mean": "mean",
    "min": "min",
    "product": "product",
    "sum": "sum",
}
"""By name, also by that of an operation of torch, such as `ReduceOp.SUM`."""


def reduction(operation: Any) -> Word:
    """The core's name of a reduction.

    Raises: ValueError: there is no such reduction.
    """
    if operation is None:
        return "sum"
    name = str(operation if isinstance(operation, str) else getattr(operation, "name", "")).lower()
    if name in _WORDS:
        return _WORDS[name]
    raise ValueError(f"`reduce_op={operation!r}` is not a reduction. Write one of {', '.join(map(repr, _WORDS))}.")


def in_place(nest: Any, operation: Word, size: int, reduce: Callable[[Any], Any]) -> Any:
    """The tensors of `nest`, with their values replaced by `reduce(nest)`.

    Raises: TypeError: a mean of integers over several ranks.
    """
    given: list[Tensor] = []
    map_tensors(lambda path, tensor: given.append(tensor), nest)
    if size == 1:
        return nest
    for tensor in given:
        if operation == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"`all_reduce(..., reduce_op='mean')` of a tensor of {tensor.dtype}: it is reduced in place, and "
                "cannot hold fractions. Pass `tensor.float()`, or write `reduce_op='sum'`."
            )
    results: list[Tensor] = []
    map_tensors(lambda path, tensor: results.append(tensor), reduce(nest))
    for tensor, result in zip(given, results, strict=True):
        tensor.detach().copy_(result)
    return nest
