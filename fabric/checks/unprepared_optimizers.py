"""Optimizers that were not passed to `setup`: what is wrong with their steps, as an error or a message.

Some strategies replace a model's parameters by shards, and an optimizer from before `setup` still holds the old
parameters: its steps train nothing. Others (DeepSpeed, ddp_sharded) reduce gradients only for the optimizers that were
set up, and a loss scaler unscales only their gradients. In these cases a hook that torch calls before each step of any
optimizer raises; it costs a look-up for each step of an optimizer that was set up.

`fabric.backward(loss)` of a generator and a discriminator computes the gradients of both, and averages only those of
the models that were set up. So, in watched steps, a message is logged, once, for an optimizer that was not set up and
steps with gradients of `fabric.backward`. It is no error: a program may train a part of the model on each rank alone,
or average its gradients itself.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.parameters import parameters_of


@final
class UnpreparedOptimizers:
    """The unprepared optimizers of one program. `optimizers` and `models`: those that were set up."""

    def __init__(
        self, runtime: Runtime, optimizers: Mapping[Optimizer, Any], models: Callable[[], Iterable[Prepared]]
    ) -> None:
        self._runtime, self._optimizers, self._models = runtime, optimizers, models
        self._replaced = WeakTensorKeyDictionary()  # the optimizer alone may keep them in memory
        self._needing: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._hook: RemovableHandle | None = None
        self._gradients: WeakKeyDictionary[Optimizer, list[tuple[int, int]]] = WeakKeyDictionary()
        """Optimizers that have stepped, each with its gradients before the present backward."""
        self._trained: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose gradients `fabric.backward` has changed."""
        self._reported: WeakSet[Optimizer] = WeakSet()
        self.averaged: set[int] = set()
        """The ids of parameters that the program averages."""

    def add(self, module: nn.Module, before: Iterable[Tensor], why_set_up: str | None) -> None:
        """Add a model that was set up. `before`: its parameters before that.

        `why_set_up`: the reason why its optimizers must be set up, if they must.
        """
        now = {id(parameter) for parameter in module.parameters()}
        replaced = [parameter for parameter in before if id(parameter) not in now]
        self._replaced.update(dict.fromkeys(replaced, type(module).__name__))
        if why_set_up is not None:
            self._needing[module] = why_set_up
        if (replaced or why_set_up is not None) and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._check)

    def release(self) -> None:
        """Remove the hook from the steps of all optimizers."""
        if self._hook is not None:
            self._hook.remove()

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
        if optimizer in self._optimizers:
            return
        self.refuse_replaced([optimizer])
        own = self._own(optimizer)
        for module, why in self._needing.items():
            if not own.isdisjoint(map(id, module.parameters())):
                raise RuntimeError(_UNKNOWN.format(type(optimizer).__name__, type(module).__name__, why))

    def _own(self, optimizer: Optimizer) -> set[int]:
        """The ids of its parameters that no prepared optimizer holds: SAM, for example, contains an optimizer."""
        held = {id(each) for known in self._optimizers for each in parameters_of(known)}
        return {id(each) for each in parameters_of(optimizer)} - held

    def before_backward(self) -> None:
        """`fabric.backward` is about to compute gradients, in a watched step."""
        for optimizer in self._gradients:
            self._gradients[optimizer] = _gradients_of(optimizer)

    def after_backward(self) -> None:
        """`fabric.backward` has computed gradients."""
        self._trained.update(each for each, before in self._gradients.items() if _gradients_of(each) != before)

    def step(self, optimizer: Optimizer) -> None:
        """An optimizer that was not set up is about to step, in a watched step."""
        self._gradients.setdefault(optimizer, [])
        if optimizer not in self._trained or optimizer in self._reported:
            return
        self._reported.add(optimizer)
        name = type(optimizer).__name__
        own = {id(each) for each in parameters_of(optimizer) if each.is_leaf and each.grad is not None}
        own &= self._own(optimizer)
        of = [each for each in self._models() if not own.isdisjoint(map(id, each.module.parameters()))]
        known = {id(each) for model in self._models() for each in model.sync.parameters_held()}
        if of:
            self._runtime.report(_NOT_COUNTED.format(name, type(of[0].module).__name__))
        elif own and own.isdisjoint(known | self.averaged):
            self._runtime.report(_NOT_AVERAGED.format(optimizer=name, number=len(own)))


def _gradients_of(optimizer: Optimizer) -> list[tuple[int, int]]:
    return [(id(each.grad), each.grad._version) for each in parameters_of(optimizer) if each.grad is not None]


_REPLACED = (
    "The `{optimizer}` was made before `fabric.setup` of `{name}` and was not passed to it: the strategy has replaced "
    "the parameters of `{name}`, and these are no longer used, so nothing would be trained. Write `model, optimizer = "
    "fabric.setup(model, optimizer)`, or make it from what `fabric.setup` returned."
)
_UNKNOWN = "`{}.step()` of an optimizer of `{}` that was not set up: {}"
_NOT_COUNTED = (
    "`{}.step()` of an optimizer of `{}` that was not set up: `fabric.num_steps` does not count its steps, and its "
    "states and hyperparameters are not compared. Write `model, optimizer = fabric.setup(model, optimizer)`, or "
    "`optimizer = fabric.setup_optimizers(optimizer)`."
)
_NOT_AVERAGED = (
    "`{optimizer}.step()` of an optimizer that was not set up, with gradients of `fabric.backward` for {number} "
    "parameters of no model that was set up: they are not averaged, and each rank trains weights of its own. Write "
    "`model, optimizer = fabric.setup(model, optimizer)`, or `fabric.average_gradients(model.parameters())` before "
    "the step. If each rank is to have weights of its own, ignore this message."
)
