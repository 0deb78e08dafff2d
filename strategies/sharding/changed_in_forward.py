"""Finds gathered copies of sharded parameters that forward has changed: they are freed, and the change is lost.

Such a model trains in one process: a momentum encoder that is updated in `forward`, a temperature that is clamped
there. Changes through `.data` count in no version of the copy, so this rank's part of each copy is compared with its
shard before the copy is freed: in the first calls, and then in each call whose number is a power of two.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

_FIRST = 8


@final
class Calls:
    """Counts the outermost calls of a model, with and without gradients, and selects those that are checked."""

    def __init__(self) -> None:
        self._numbers = [0, 0]
        self.is_checked = False

    def next(self) -> None:
        """A call begins."""
        index = int(torch.is_grad_enabled())
        self._numbers[index] = number = self._numbers[index] + 1
        self.is_checked = number <= _FIRST or number & (number - 1) == 0


def differ(part: Tensor, shard: Tensor) -> bool:
    """Whether this rank's part of a gathered copy has other values than its shard, in the dtype of the copy."""
    if part.shape != shard.shape:
        return True
    with torch.no_grad():
        then = shard.to(part.device, part.dtype)
        return not (torch.equal(part, then) or torch.allclose(part, then, rtol=0, atol=0, equal_nan=True))


CHANGED = (
    "Forward of `{model}` changed parameters that are sharded: {names}. Within it they are gathered copies, which are "
    "freed afterwards, so the change would be lost. Change them between forwards: "
    "`with torch.no_grad(): k.mul_(m).add_(q, alpha=1 - m)` for the pairs of parameters of a momentum encoder, "
    "`parameter.clamp_(...)` for a limit; or make them buffers, which are not sharded; or pass `strategy='ddp'`."
)
