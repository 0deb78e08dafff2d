"""Gradients times a factor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from fabric.strategies.tensors.dtensor import local_part

Factor: TypeAlias = "float | Tensor"
"""A number, or a tensor without dimensions, whose value is not copied to the host."""

_SINGLE_BYTES = 4


def scale_gradients(parameters: Iterable[Tensor], factor: Factor) -> None:
    """Multiply this rank's gradients, or its shards of them, of the trained parameters."""
    multiply([grad for each in parameters if (grad := each.grad) is not None and each.requires_grad], factor)


@torch.no_grad()
def multiply(tensors: Iterable[Tensor], factor: Factor) -> None:
    """Multiply tensors, or this rank's shards, of any dtypes in place, each product rounded once."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        part = each if type(each) is Tensor else local_part(each)
        alike.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), parts in alike.items():
        if dtype.itemsize < _SINGLE_BYTES:  # torch would round the factor to 16 bits as well: `_foreach_mul_`, `mul_`
            wide = torch.as_tensor(factor, device=device) if isinstance(factor, Tensor) else factor
            for part in parts:
                part.copy_(part.float().mul_(wide))
        elif isinstance(factor, Tensor) or device.type == "cpu":  # which would convert a number for each gradient
            torch._foreach_mul_(parts, torch.as_tensor(factor, dtype=dtype.to_real(), device=device))
        else:
            torch._foreach_mul_(parts, factor)
