"""Placeholders in `parameter.grad` for gradients that DeepSpeed keeps in shards.

At stages 2 and 3 a gradient leaves `parameter.grad` during backward, so `model.zero_grad()` would find nothing to zero.
Between a backward and the next use of the gradients, each parameter with a gradient has a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from torch import Tensor

from fabric.strategies.gradients.in_shards import InShards


@final
class Shown:
    """The placeholders in the parameters of one model."""

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self.names = names
        self._made: dict[Tensor, InShards] = {}
        self._shown: list[Tensor] = []

    def show(self, parameters: Iterable[Tensor]) -> None:
        """Set a placeholder as the gradient of each parameter."""
        self._shown = list(parameters)
        for parameter in self._shown:
            try:
                parameter.grad = self._made[parameter]
            except (KeyError, RuntimeError):  # a first gradient, or one of a parameter that was whole and is in shards
                parameter.grad = self._made[parameter] = InShards(parameter, _READ)

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """Remove the placeholders. Returns the parameters whose gradient was set to None, and those with a zeroed one.

        Raises: RuntimeError: one was given another gradient.
        """
        gone, zeroed = [], []
        for parameter in self._shown:
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
        """Remove the placeholders, whatever was done to them."""
        for parameter in self._shown:
            parameter.grad = None
            self._made[parameter].is_zeroed = False
        self._shown = []


_READ = (
    "that DeepSpeed keeps in shards over the ranks: `parameter.grad` has no values here. To clip, or for the norm, "
    "call `fabric.clip_gradients(model, optimizer, max_norm=...)`; to read gradients, use `strategy='ddp'`."
)
_ASSIGNED = (
    "`{name}` was given another gradient by assignment to `grad`, and DeepSpeed would step with the one it keeps in "
    "shards. Change the loss instead, or use `strategy='ddp'`. `None` discards the gradient."
)
