"""Optimizers that were never set up, of models that were: where they would train nothing, or on each rank its own.

Some strategies replace a model's parameters (by shards), and an optimizer made before `setup` goes on holding the old
ones: its steps move nothing that the model uses. Others (DeepSpeed, ddp_sharded) reduce gradients for optimizers that
they know, and no others. Torch calls a hook before each step of any optimizer; it is registered only where one of the
two is so, and costs a look-up for each step of an optimizer that was set up.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import ExitStack
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fabric.strategies.tensors.parameters import parameters_of


@final
class UnpreparedOptimizers:
    """What one fabric knows of the parameters of its models. `prepared`: the optimizers that were set up."""

    def __init__(self, prepared: Container[Optimizer]) -> None:
        self._prepared = prepared
        self._replaced = WeakTensorKeyDictionary()  # the optimizer alone may keep them in memory
        self._needing: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._is_attached = False

    def add(self, module: nn.Module, before: Iterable[Tensor], undo: ExitStack, why_set_up: str | None) -> None:
        """Take in a model that was set up. `before`: its parameters as they were then.

        `why_set_up`: why its optimizer must have been set up with it; None where it need not.
        """
        now = {id(parameter) for parameter in module.parameters()}
        replaced = [parameter for parameter in before if id(parameter) not in now]
        self._replaced.update(dict.fromkeys(replaced, type(module).__name__))
        if why_set_up is not None:
            self._needing[module] = why_set_up
        if (replaced or why_set_up is not None) and not self._is_attached:
            self._is_attached = True
            undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def model_of(self, parameter: Tensor) -> str | None:
        """The model of a parameter that `setup` has replaced; None for any other."""
        name: str | None = self._replaced.get(parameter)  # type: ignore[no-untyped-call]
        return name

    def refuse_replaced(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise ValueError if an optimizer that was not set up with its model holds parameters that were replaced."""
        for optimizer in optimizers:
            for name in filter(None, map(self.model_of, parameters_of(optimizer))):
                raise ValueError(_REPLACED.format(optimizer=type(optimizer).__name__, name=name))

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._prepared:
            return
        self.refuse_replaced([optimizer])
        held = set(map(id, parameters_of(optimizer)))
        for module, why in self._needing.items():
            if not held.isdisjoint(map(id, module.parameters())):
                raise RuntimeError(_UNKNOWN.format(type(optimizer).__name__, type(module).__name__, why))


_REPLACED = (
    "The `{optimizer}` was made before `fabric.setup` of `{name}` and was not passed to it: the strategy has replaced "
    "the parameters of `{name}`, and these are no longer used, so nothing would be trained. Write `model, optimizer = "
    "fabric.setup(model, optimizer)`, or make it from what `fabric.setup` returned."
)
_UNKNOWN = (
    "`{}.step()` of an optimizer of `{}` that was not set up: each rank would step with its own gradients, which are "
    "not averaged. {}"
)
