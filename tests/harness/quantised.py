"""Weights in 8 bits with a scale for each row, by torch's protocol for wrapper subclasses, and adapters beside them.

What such a tensor can do is what torchao's can: be copied, moved and multiplied. All else raises, as there. Scales may
be quantised as well, as those of NF4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten


class Int8(Tensor):
    """`codes * scales`."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Int8:
        made: Int8 = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=scales.dtype, device=codes.device
        )
        return made

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def dequantize(self) -> Tensor:
        return values_of(self)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Int8:
        return Int8(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if function in (aten.detach.default, aten.clone.default, aten.alias.default):
            return Int8(*(function(each, *args[1:], **(kwargs or {})) for each in (first.codes, first.scales)))
        if function is aten._to_copy.default:
            dtype, rest = (kwargs or {}).get("dtype"), {k: v for k, v in (kwargs or {}).items() if k != "dtype"}
            return Int8(function(first.codes, **rest), function(first.scales, dtype=dtype, **rest))
        if function is aten.copy_.default:
            first.codes.copy_(args[1].codes)
            first.scales.copy_(args[1].scales)
            return first
        if function is aten.t.default:
            return values_of(first).t()
        raise NotImplementedError(f"Int8 has no {function}")


def values_of(tensor: Tensor) -> Tensor:
    """The numbers that a tensor stands for."""
    return values_of(tensor.scales) * tensor.codes if isinstance(tensor, Int8) else tensor


def quantise(weight: Tensor, *, twice: bool) -> Int8:
    """`twice`: the scales, too."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return Int8(codes, quantise(scales.T.contiguous(), twice=False) if twice else scales)


class Adapted(nn.Module):
    """A frozen quantised layer, with an adapter of low rank."""

    def __init__(self, size: int, *, twice: bool) -> None:
        super().__init__()
        self.base = nn.Linear(size, size)
        weight = quantise(self.base.weight.detach(), twice=twice)
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def make_net(*, twice: bool = False) -> nn.Sequential:
    """Two adapted layers and a head; the scales of the second are quantised, if `twice`."""
    torch.manual_seed(0)
    return nn.Sequential(Adapted(8, twice=False), nn.Tanh(), Adapted(8, twice=twice), nn.Linear(8, 2))
