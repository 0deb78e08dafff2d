"""Tensors whose lengths differ over ranks, padded to the longest, so that they can be gathered.

Every rank says what it has before anything is padded, and learns the longest length of each tensor from one message.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fabric.strategies.collectives.call_check import agree
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.nest import map_tensors
from fabric.strategies.collectives.packing import Spec, check_dense


def pad_across_ranks(collective: Collective, data: Any, dim: int = 0, pad_value: float = 0) -> Any:
    """Append `pad_value` along `dim` to each tensor, up to the greatest length that any rank has there.

    Ranks: all call it. A tensor that is as long as the longest is given back as it is.
    Shapes: `(*A, N, *B)` -> `(*A, M, *B)`, M the greatest N; all other dimensions are the same on every rank.
    Cost: a comparison, and one number for each tensor. Gradient: flows through.
    Raises: CollectiveError: the ranks' data differs in more than lengths along `dim`; IndexError: a tensor without
    that dimension; ValueError: a dtype that does not hold `pad_value`; TypeError: something that is no tensor.
    """
    lengths: list[int] = []
    lines = [f"pad_across_ranks with dim={dim} and pad_value={pad_value!r}"]

    def collect(path: str, tensor: Tensor) -> None:
        check_dense(tensor)
        _check_dim(path, tensor, dim)
        _check_value(path, tensor, pad_value)
        lengths.append(tensor.shape[dim])
        lines.append(f"{path}: {_open_spec(tensor, dim)}")

    try:
        map_tensors(collect, data)
    except (IndexError, TypeError, ValueError) as error:
        agree(collective, f"{lines[0]}, refused: {error}")
        raise
    agree(collective, "\n".join(lines))
    longest = iter(collective.all_reduce(torch.tensor(lengths, dtype=torch.int64, device="cpu"), "max").tolist())
    return map_tensors(lambda path, tensor: _padded(tensor, dim, next(longest), pad_value), data)


def _padded(tensor: Tensor, dim: int, length: int, value: float) -> Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


def _open_spec(tensor: Tensor, dim: int) -> str:
    spec = Spec.of(tensor)
    shape = [str(length) for length in spec.shape]
    shape[dim] = "any"
    return f"{str(spec.dtype).removeprefix('torch.')} ({', '.join(shape)}) on {spec.device_type}"


def _check_dim(path: str, tensor: Tensor, dim: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise IndexError(
            f"`pad_across_ranks(..., dim={dim})`: `{path}` has shape {tuple(tensor.shape)} and no such dimension. Pass "
            f"a `dim` that it has, or leave it out of the nest; a tensor without dimensions needs no padding."
        )


def _check_value(path: str, tensor: Tensor, value: float) -> None:
    held = torch.tensor(value, device="cpu").to(tensor.dtype).to(torch.complex128)
    if held.item() == value or (math.isnan(value) and math.isnan(held.real)):
        return
    if tensor.is_floating_point() and math.isfinite(value) and math.isfinite(held.real):
        return  # the nearest number of the dtype, as an operation on the tensor would use it
    raise ValueError(
        f"`pad_across_ranks(..., pad_value={value!r})`: `{path}` is {tensor.dtype}, which does not hold that number. "
        "Pass a `pad_value` that it holds, or convert the tensor."
    )
