"""A parameter without dimensions whose gradient is the weight of this rank's loss: DistributedDataParallel averages it
with the other gradients, so that weights need no message of their own.

It belongs to what DistributedDataParallel wraps, not to the user's module. Its gradient comes last, after the loss's
backward: then the last bucket is sent. Its dtype must be that of some gradients, or it would get a bucket of its own;
in half precision the sum of the weights would be rounded, so it needs gradients in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from fabric.strategies.gradients.sync import Factor


@final
class Carrier:
    """The weight of one model's losses, sent with its gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters`: those that are trained, some of them in float32 or float64."""
        beside = next(each for each in parameters if each.dtype in _EXACT)
        self.parameter = nn.Parameter(torch.zeros((), dtype=beside.dtype, device=beside.device))
        self._weight: Factor = 0.0
        self._sent = torch.zeros_like(self.parameter, requires_grad=False)

    def load(self, weight: Factor) -> None:
        """Send this weight next, instead of zero."""
        self._weight = weight

    def send(self) -> None:
        """Complete the synchronisation of a backward. Ranks: all."""
        weight, self._weight = self._weight, 0.0
        self.parameter.grad = None
        sent = weight.to(self.parameter) if isinstance(weight, Tensor) else self._sent.fill_(weight)
        self.parameter.backward(sent)  # type: ignore[no-untyped-call]

    def mean(self) -> Factor:
        """The mean weight of all ranks, after `send`; 1.0 if nothing was sent: the backward reached no parameter."""
        mean, self.parameter.grad = self.parameter.grad, None
        if mean is None:
            return 1.0
        return mean.item() if mean.is_cpu else mean.clone()


_EXACT = (torch.float32, torch.float64)


def can_carry(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether some of these parameters have gradients in float32 or float64."""
    return any(each.dtype in _EXACT for each in parameters)
