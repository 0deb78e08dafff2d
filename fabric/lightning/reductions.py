"""That library's reductions: names, torch's `ReduceOp`, and in-place results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fabric.lightning.utilities.types import ReduceOp
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
_OPERATIONS: tuple[tuple[Any, Word], ...] = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "mean"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.PRODUCT, "product"),
)


def reduction(operation: Any) -> Word:
    """The core's name of a reduction.

    Raises: ValueError: there is no such reduction.
    """
    if operation is None:
        return "sum"
    if isinstance(operation, str):
        if operation.lower() in _WORDS:
            return _WORDS[operation.lower()]
    else:
        for one, word in _OPERATIONS:
            if operation == one:
                return word
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
