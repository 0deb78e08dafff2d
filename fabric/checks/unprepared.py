"""Optimizers that were never set up, of models that were: where they would train nothing, or on each rank its own.

Some strategies replace a model's parameters (by shards), and an optimizer made before `setup` goes on holding the old
ones: its steps move nothing that the model uses. Others (DeepSpeed, ddp_sharded) reduce gradients for optimizers that
they know, and no others. Torch calls a hook before each step of any optimizer; it is registered only where one of the
two is so, and costs a look-up for each step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import ExitStack
from typing import Any, final
from weakref import WeakSet

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
        self._needing: list[tuple[nn.Module, str]] = []
        self._harmless: WeakSet[Optimizer] = WeakSet()
        self._is_watching = False

    def add(self, module: nn.Module, before: Iterable[Tensor], undo: ExitStack, why_set_up: str | None) -> None:
        """Take in a model that was set up. `before`: its parameters as they were then.

        `why_set_up`: why its optimizer must have been set up with it; None where it need not.
        """
        now = {id(parameter) for parameter in module.parameters()}
        for parameter in before:
            if id(parameter) not in now:
                self._replaced[parameter] = type(module).__name__
        if why_set_up is not None:
            self._needing.append((module, why_set_up))
        self._harmless.clear()
        if not self._is_watching and (len(self._replaced) or self._needing):
            self._is_watching = True
            undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def refuse_replaced(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise ValueError if an optimizer, to be set up later than a model, holds parameters that were replaced."""
        for optimizer in optimizers:
            name = self._replaced_in(optimizer)
            if name is not None:
                raise ValueError(_MADE_BEFORE.format(optimizer=type(optimizer).__name__, name=name))

    def _replaced_in(self, optimizer: Optimizer) -> str | None:
        """The class of a model whose parameters were replaced, and which the optimizer holds as they were before."""
        found = (self._replaced.get(each) for each in parameters_of(optimizer))  # type: ignore[no-untyped-call]
        return next((name for name in found if name is not None), None)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._prepared or optimizer in self._harmless:
            return
        kind = type(optimizer).__name__
        name = self._replaced_in(optimizer)
        if name is not None:
            raise RuntimeError(_REPLACED.format(optimizer=kind, name=name))
        held = parameters_of(optimizer)
        for module, why in self._needing:
            own = {id(parameter) for parameter in module.parameters()}
            if any(id(parameter) in own for parameter in held):
                raise RuntimeError(_UNKNOWN.format(optimizer=kind, name=type(module).__name__, why=why))
        self._harmless.add(optimizer)


_REPLACED = (
    "`{optimizer}.step()` of an optimizer that was made before `fabric.setup` and was not passed to it: the strategy "
    "has replaced the parameters of `{name}`, and these are no longer used, so nothing would be trained. Write `model, "
    "optimizer = fabric.setup(model, optimizer)`."
)
_MADE_BEFORE = (
    "The `{optimizer}` was made before `fabric.setup` of `{name}`, where the strategy has replaced the parameters, and "
    "holds the former ones, which are no longer used: nothing would be trained. Make it from what `fabric.setup` "
    "returned, or write `model, optimizer = fabric.setup(model, optimizer)`."
)
_UNKNOWN = (
    "`{optimizer}.step()` of an optimizer of `{name}` that was not set up: each rank would step with its own "
    "gradients, which are not averaged. {why}"
)
