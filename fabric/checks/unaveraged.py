"""Optimizers of a model that was never set up, beside one that was: each rank trains it on its own.

`fabric.backward(loss)` of a generator and a discriminator computes the gradients of both, and averages those of the
models that were set up. So a message is logged, once, for an optimizer that was not set up, that steps twice with
gradients of `fabric.backward`, and that holds no parameter which is averaged. It is no error: ranks may train a part of
their own, and a program may average by calls of its own.

It looks at the steps that the sanitizer watches: an optimizer's parameters are compared with those of all models at its
first two.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fabric.checks.check import Check
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.parameters import parameters_of


@final
class UnaveragedOptimizers(Check):
    """What one fabric knows of optimizers that were not set up. `prepared`: those that were; `models`: likewise."""

    def __init__(self, runtime: Runtime, prepared: Container[Optimizer], models: Iterable[Prepared]) -> None:
        self._runtime, self._prepared, self._models = runtime, prepared, models
        self._averaged = WeakTensorKeyDictionary()
        self._judged: WeakSet[Optimizer] = WeakSet()
        self._trained: WeakSet[Optimizer] = WeakSet()
        """Those that have received a gradient from `fabric.backward`."""
        self._hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    def attach(self) -> None:
        """Look at each step of any optimizer, until it is removed."""
        self._handle = register_optimizer_step_pre_hook(self._check)

    def removed(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._remove_hooks()

    def before_setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Parameters with hooks are not sharded. An optimizer that is not set up gets its hook again, at its next
        step."""
        self._remove_hooks()

    def gradients_averaged(self, parameters: Iterable[Tensor]) -> None:
        self._averaged.update(dict.fromkeys(parameters, True))

    def _remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._prepared or optimizer in self._judged:
            return
        if optimizer in self._hooks:
            if optimizer not in self._trained:
                return
            self._hooks.pop(optimizer).remove()  # not by the hook itself: torch iterates over them
        own = self._own(optimizer)
        if own and optimizer not in self._trained:
            held = ref(optimizer)  # not kept by its parameter: an inner loop may make one for each task
            hook = own[0].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._note_gradient(held())
            )
            self._hooks[optimizer] = hook
            return
        self._judged.add(optimizer)
        if own:
            self._runtime.report(_NOT_AVERAGED.format(optimizer=type(optimizer).__name__, number=len(own)))

    def _own(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters with gradients, if none of them is averaged over the ranks."""
        found = [each for each in parameters_of(optimizer) if each.grad is not None and each.is_leaf]
        known = {
            id(each) for model in self._models for each in (*model.module.parameters(), *model.sync.parameters_held())
        }
        return [] if any(id(each) in known or each in self._averaged for each in found) else found

    def _note_gradient(self, optimizer: Optimizer | None) -> None:
        if optimizer is not None and self._runtime.backward.is_running:
            self._trained.add(optimizer)


_NOT_AVERAGED = (
    "`{optimizer}.step()` of an optimizer that was not set up, with gradients of `fabric.backward` for {number} "
    "parameters of no model that was set up: they are not averaged, and each rank trains weights of its own. Write "
    "`model, optimizer = fabric.setup(model, optimizer)`, or `fabric.average_gradients(model.parameters())` before "
    "the step. If each rank is to have weights of its own, ignore this message."
)
