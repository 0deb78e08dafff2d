"""Placeholders in `parameter.grad` for gradients that DeepSpeed keeps in shards.

At stages 2 and 3 a gradient leaves `parameter.grad` during backward, so `model.zero_grad()` would find nothing to zero.
Between a backward and the next use of the gradients, each parameter with a gradient has a placeholder. It shows
whether the gradient was zeroed, by `zero_grad` of the model, of a submodule or of another optimizer, or by
`parameter.grad = None`. Computing with a placeholder raises; None would be skipped silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from fabric.strategies.torch_internals import disabled_torch_function_impl


@final
class InShards(Tensor):
    """A gradient without values. Records when it is zeroed; any other operation raises RuntimeError."""

    is_zeroed: bool

    @staticmethod
    def __new__(cls, parameter: Tensor) -> InShards:
        """Of the shape, dtype and device of the parameter."""
        made: InShards = Tensor._make_wrapper_subclass(
            cls, parameter.size(), dtype=parameter.dtype, device=parameter.device
        )
        made.is_zeroed = False
        return made

    __torch_function__: ClassVar[Any] = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record that gradients were zeroed."""
        if operator is torch.ops.aten.zero_.default:
            args[0].is_zeroed = True
            return args[0]
        if operator is torch.ops.aten._foreach_zero_.default:
            for gradient in args[0]:
                gradient.zero_()
            return None
        raise RuntimeError(_READ.format(operator=operator))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of shape {tuple(self.shape)}, in shards>"


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
                parameter.grad = self._made[parameter] = InShards(parameter)

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
    "`{operator}` of a gradient that DeepSpeed keeps in shards over the ranks: `parameter.grad` has no values here. To "
    "clip, or for the norm, call `fabric.clip_gradients(model, optimizer, max_norm=...)`; to read gradients, use "
    "`strategy='ddp'`."
)
_ASSIGNED = (
    "`{name}` was given another gradient by assignment to `grad`, and DeepSpeed would step with the one it keeps in "
    "shards. Change the loss instead, or use `strategy='ddp'`. `None` discards the gradient."
)
