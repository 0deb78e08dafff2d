"""Tensors whose lengths differ over ranks, padded to the longest, so that they can be gathered.

Ranks first compare what they pass, then get the greatest length of each tensor by one message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fabric.strategies.collectives.call_check import check_call
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.tensors.nests import map_by_path
from fabric.strategies.tensors.packing import Spec, check_dense


def pad_across_ranks(collective: Collective, data: Any, dim: int = 0, pad_value: float = 0) -> Any:
    """Pad each tensor with `pad_value` along `dim`, to the greatest length on any rank.

    Ranks: all call it. A tensor that already has this length is returned itself.
    Shapes: `(*A, N, *B)` -> `(*A, M, *B)`, M the greatest N; all other dimensions are the same on every rank.
    Cost: a comparison, and one number for each tensor. Differentiable.
    Raises: CollectiveError: the ranks' data differs in more than lengths along `dim`; IndexError: a tensor without that
    dimension; ValueError: a dtype cannot represent `pad_value`; TypeError: a leaf is no tensor.
    """
    lengths: list[int] = []
    lines = [f"pad_across_ranks with dim={dim} and pad_value={pad_value!r}"]

    def collect(path: str, tensor: Tensor) -> None:
        check_dense(tensor)
        _check_value(path, tensor, pad_value)
        lengths.append(tensor.size(dim))
        lines.append(f"{path}: {_open_spec(tensor, dim)}")

    try:
        map_by_path(collect, data)
    except (IndexError, TypeError, ValueError) as error:
        check_call(collective, f"{lines[0]}, refused: {error}")
        raise
    check_call(collective, "\n".join(lines))
    longest = iter(collective.all_reduce(torch.tensor(lengths, dtype=torch.int64, device="cpu"), "max").tolist())
    return map_by_path(lambda path, tensor: _padded(tensor, dim, next(longest), pad_value), data)


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


def _check_value(path: str, tensor: Tensor, value: float) -> None:
    is_exact = not tensor.is_floating_point() and not tensor.is_complex()
    if is_exact and torch.tensor(value, device="cpu").to(tensor.dtype).item() != value:
        raise ValueError(
            f"`pad_across_ranks(..., pad_value={value!r})`: `{path}` is {tensor.dtype}, which cannot represent it. "
            "Pass another `pad_value`, or convert the tensor."
        )
