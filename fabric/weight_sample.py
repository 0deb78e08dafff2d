"""A few weights of each rank, by which replicas that train apart are found.

Gradient noise, weights drawn anew and a change on one rank alone leave replicas that are averaged as if they were one
model. They differ nearly everywhere, so one element of each of some parameters shows it. It is not compared bit for
bit: ranks of different hardware round differently, and drift apart by far less than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn

_MAX_PARAMETERS = 16
_TOLERANCE = 1e-3
"""Of the largest of the sampled weights."""
_TOLERANCE_IN_HALF = 5e-2


@final
class WeightSample:
    """One element of each of up to 16 parameters. `number`: which elements; the same on every rank.

    Cost: some 0.1 ms, and on an accelerator one wait for the device.
    """

    def __init__(self, parameters: Iterable[Tensor], number: int) -> None:
        plain = [each for each in parameters if type(each) in (Tensor, nn.Parameter) and each.numel()]
        plain = [each for each in plain if each.requires_grad and not each.is_complex()]
        chosen = plain[number % max(1, len(plain) // _MAX_PARAMETERS) :: max(1, len(plain) // _MAX_PARAMETERS)]
        self._places = [
            (tuple(each.shape), _index(each, number * 7919 % each.numel())) for each in chosen[:_MAX_PARAMETERS]
        ]
        elements = [each.detach()[index] for each, (_, index) in zip(chosen, self._places, strict=False)]
        self.values: list[float] = torch.stack([each.double().cpu() for each in elements]).tolist() if elements else []
        is_half = any(each.dtype in (torch.float16, torch.bfloat16) for each in chosen)
        self._tolerance = _TOLERANCE_IN_HALF if is_half else _TOLERANCE

    def to_text(self) -> str:
        """The values, to be sent."""
        return " ".join(each.hex() for each in self.values)

    def difference(self, of_rank_zero: str) -> str | None:
        """The first weight that differs from that of rank 0, in words; None if none does."""
        others = [float.fromhex(each) for each in of_rank_zero.split()]
        if len(others) != len(self.values):
            return "they hold other parameters"
        limit = self._tolerance * max((abs(each) for each in others if math.isfinite(each)), default=0.0)
        for (shape, index), own, other in zip(self._places, self.values, others, strict=True):
            if own != other and not abs(own - other) <= limit and not (math.isnan(own) and math.isnan(other)):
                return f"a parameter of shape {shape} has {own:.6g} at {list(index)}, and {other:.6g} on rank 0"
        return None


def _index(tensor: Tensor, number: int) -> tuple[int, ...]:
    """The place of an element, which is numbered in the order of `flatten()`."""
    index = []
    for size in reversed(tensor.shape):
        number, place = divmod(number, size)
        index.append(place)
    return tuple(reversed(index))
