"""Placeholders in `parameter.grad` for gradients that DeepSpeed keeps in shards.

At stages 2 and 3 a gradient leaves `parameter.grad` during backward, so `model.zero_grad()` would find nothing to zero.
At stage 1 it is this rank's own until the step, and would be read as the average. Between a backward and the next use
of the gradients, each parameter with a gradient has a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from torch import Tensor

from fabric.strategies.tensors.in_shards import InShards


@final
class Placeholders:
    """The placeholders in the parameters of one model."""

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self.names = names
        self._made: dict[Tensor, InShards] = {}
        self._parameters: list[Tensor] = []

    def set(self, parameters: Iterable[Tensor]) -> None:
        """Set a placeholder as the gradient of each parameter."""
        self._parameters = list(parameters)
        for parameter in self._parameters:
            try:
                parameter.grad = self._made[parameter]
            except (KeyError, RuntimeError):  # none was made, or the parameter was not sharded then
                parameter.grad = self._made[parameter] = InShards(parameter, _READ)

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """Remove the placeholders. Returns the parameters whose gradient was set to None, and those with a zeroed one.

        Raises: RuntimeError: another gradient was assigned to a parameter.
        """
        gone, zeroed = [], []
        for parameter in self._parameters:
            gradient, made = parameter.grad, self._made[parameter]
            if gradient is None:
                gone.append(parameter)
            elif gradient is not made:
                raise RuntimeError(_ASSIGNED.format(name=self.names[parameter]))
            elif made.is_zeroed:
                zeroed.append(parameter)
        self.drop()
        return gone, zeroed

    def drop(self) -> None:
        """Remove the placeholders, also those that were zeroed."""
        for parameter in self._parameters:
            parameter.grad = None
            self._made[parameter].is_zeroed = False
        self._parameters = []


_READ = (
    "that DeepSpeed keeps, in shards or not averaged yet: `parameter.grad` has no values here. To clip, or for the "
    "norm, call `fabric.clip_gradients(model, optimizer, max_norm=...)`; to read gradients, use `strategy='ddp'`."
)
_ASSIGNED = (
    "Another gradient was assigned to `{name}.grad`, but DeepSpeed would step with the one that it keeps. "
    "Change the loss instead, or use `strategy='ddp'`. `None` discards the gradient."
)
