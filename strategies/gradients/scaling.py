"""Gradients times a factor. Its speed counts: it runs in every step that has weights."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

from fabric.strategies.tensors.dtensor import local_part

Factor: TypeAlias = "float | Tensor"
"""A number, or a tensor without dimensions, whose value is not copied to the host."""
_Kind: TypeAlias = "tuple[type[Tensor], torch.device, torch.dtype, bool]"

_SINGLE_BYTES = 4
_kind = attrgetter("__class__", "device", "dtype", "requires_grad")


def scale_gradients(parameters: Iterable[Tensor], factor: Factor) -> None:
    """Multiply this rank's gradients, or its shards of them, of the trained parameters."""
    multiply([grad for each in parameters if (grad := each.grad) is not None and each.requires_grad], factor)


def multiply(tensors: list[Tensor], factor: Factor) -> None:
    """Multiply tensors, or this rank's shards, of any dtypes in place, each product rounded once."""
    kinds: set[_Kind] = {*map(_kind, tensors)}
    if len(kinds) == 1 and kinds <= _operands.keys() and not isinstance(factor, Tensor):
        _multiply_here(tensors, factor, *kinds)
        return
    with torch.no_grad():  # takes a third of the time of multiplying a few gradients
        parts = [each.detach() if type(each) is Tensor else local_part(each).detach() for each in tensors]
        for kind in {*map(_kind, parts)}:
            _multiply_alike([each for each in parts if _kind(each) == kind], factor, kind)


def _multiply_alike(tensors: list[Tensor], factor: Factor, kind: _Kind) -> None:
    _, device, dtype, _ = kind
    moved = factor.to(device) if isinstance(factor, Tensor) else factor
    if dtype.itemsize < _SINGLE_BYTES:  # torch would round the factor to 16 bits as well: `_foreach_mul_`, `mul_`
        for each in tensors:
            each.copy_(each.float().mul_(moved))
    elif isinstance(moved, Tensor):
        torch._foreach_mul_(tensors, moved.to(dtype.to_real()))
    elif kind in _operands:
        _multiply_here(tensors, moved, kind)
    else:
        torch._foreach_mul_(tensors, moved)


def _multiply_here(tensors: list[Tensor], factor: float, kind: _Kind) -> None:
    """Multiply on the CPU by a tensor: a number would be converted for each gradient, 0.5 ms for 300 small ones. The
    tensor is kept, because to create one takes longer here than to multiply a few gradients; see Note [Cold Python] in
    `process_group.py`."""
    kept = _operands[kind]
    memory, operand = kept.pop() if kept else _new_operand(kind[2])  # threads have one each
    memory[0] = factor
    torch._foreach_mul_(tensors, operand)
    kept.append((memory, operand))


def _new_operand(dtype: torch.dtype) -> tuple[array[float], Tensor]:
    memory = array("f" if dtype is torch.float32 else "d", [0.0])
    return memory, torch.frombuffer(memory, dtype=dtype)[0]


_operands: dict[_Kind, list[tuple[array[float], Tensor]]] = {
    (Tensor, torch.device("cpu"), dtype, False): [] for dtype in (torch.float32, torch.float64)
}
