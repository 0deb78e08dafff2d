"""Optimizers of a model that was never set up, beside one that was: each rank trains it on its own.

`fabric.backward(loss)` of a generator and a discriminator computes the gradients of both, and averages those of the
models that were set up. So a message is logged, once, for an optimizer that was not set up, and that steps in watched
steps with gradients of `fabric.backward` for parameters that nothing averages. It is no error: ranks may train a part
of their own, and a program may average by calls of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer

from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.parameters import parameters_of


@final
class Strangers:
    """What one fabric knows of optimizers that were not set up. `models`: those that were."""

    def __init__(self, runtime: Runtime, models: Callable[[], Iterable[Prepared]]) -> None:
        self._runtime, self._models = runtime, models
        self._gradients: WeakKeyDictionary[Optimizer, list[tuple[int, int]]] = WeakKeyDictionary()
        """Optimizers that have stepped, each with its gradients before the present backward."""
        self._trained: WeakSet[Optimizer] = WeakSet()
        """Those that have got gradients from `fabric.backward`."""
        self._reported: WeakSet[Optimizer] = WeakSet()
        self.averaged: set[int] = set()
        """The ids of parameters that the program averages."""

    def before_backward(self) -> None:
        """`fabric.backward` is about to compute gradients."""
        for optimizer in self._gradients:
            self._gradients[optimizer] = _gradients_of(optimizer)

    def after_backward(self) -> None:
        """`fabric.backward` has computed gradients."""
        self._trained.update(each for each, before in self._gradients.items() if _gradients_of(each) != before)

    def step(self, optimizer: Optimizer) -> None:
        """An optimizer that was not set up is about to step."""
        self._gradients.setdefault(optimizer, [])
        if optimizer not in self._trained or optimizer in self._reported:
            return
        self._reported.add(optimizer)
        own = {id(each) for each in parameters_of(optimizer) if each.grad is not None and each.is_leaf}
        known = {
            id(each) for model in self._models() for each in (*model.module.parameters(), *model.sync.parameters_held())
        }
        if own and own.isdisjoint(known | self.averaged):
            self._runtime.report(_NOT_AVERAGED.format(optimizer=type(optimizer).__name__, number=len(own)))


def _gradients_of(optimizer: Optimizer) -> list[tuple[int, int]]:
    return [(id(each.grad), each.grad._version) for each in parameters_of(optimizer) if each.grad is not None]


_NOT_AVERAGED = (
    "`{optimizer}.step()` of an optimizer that was not set up, with gradients of `fabric.backward` for {number} "
    "parameters of no model that was set up: they are not averaged, and each rank trains weights of its own. Write "
    "`model, optimizer = fabric.setup(model, optimizer)`, or `fabric.average_gradients(model.parameters())` before "
    "the step. If each rank is to have weights of its own, ignore this message."
)
