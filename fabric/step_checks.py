"""Checks at the step of every optimizer, where several ranks train one model: of gradients that are not averaged.

Two programs that are right in one process. An optimizer that steps in a hook of its parameter, within the backward,
does so before most strategies average gradients. And gradients that the program assigns (`parameter.grad = ...`, of
`torch.autograd.grad` or of a copy of the model) are this rank's own, unless it averages them. So before a step that
follows no backward the ranks compare their gradients, a few times. Cost: 0.6 us for each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from contextlib import ExitStack
from typing import Any, TypeAlias, final
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric.strategies.collectives.call_check import all_equal
from fabric.strategies.digest import digest_of_all
from fabric.strategies.gradients.clipping import parameters_of
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.torch_internals import current_graph_task_id

_Mark: TypeAlias = tuple[ReferenceType[Tensor], int] | None
"""An optimizer's first gradient, and its version. Not its `id`, which may be used again, on some ranks alone."""
_NEVER: tuple[int, _Mark] = (-1, None)
_NUM_COMPARED = 3
"""After so many steps without a backward, with equal gradients, the program is known to average them."""


@final
class StepChecks:
    """What one fabric knows of the steps of its optimizers. `prepared`: those that were set up."""

    def __init__(self, runtime: Runtime, prepared: Container[Optimizer], undo: ExitStack) -> None:
        self._runtime, self._prepared, self._whole = runtime, prepared, True
        self._models: list[Prepared] = []
        self._last: WeakKeyDictionary[Optimizer, tuple[int, _Mark]] = WeakKeyDictionary()
        self._num_compared: Counter[Optimizer] = Counter()
        undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def add(self, model: Prepared, *, whole: bool) -> None:
        """Take in a model that was set up.

        `whole`: whether each rank has the gradients of all parameters, so that they can be compared.
        """
        self._whole = self._whole and whole
        self._models.append(model)
        self._last.update(dict.fromkeys(model.optimizers, (self._runtime.loader_numbers.num_backwards, None)))

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if current_graph_task_id() != -1:
            self._refuse_within_backward(optimizer)
        if not self._whole or optimizer not in self._prepared:
            return
        number, mark = self._runtime.loader_numbers.num_backwards, _mark(optimizer)
        number_before, mark_before = self._last.get(optimizer, _NEVER)
        self._last[optimizer] = number, mark
        if number != number_before or mark is None:
            return
        is_same = mark_before is not None and mark[0] is mark_before[0]
        if is_same and (number or mark == mark_before):  # what a backward averaged, be it changed; or the same again
            return
        if self._num_compared[optimizer] < _NUM_COMPARED:
            self._num_compared[optimizer] += 1
            gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
            if not all_equal(self._runtime.collective, str(digest_of_all(gradients))):
                raise RuntimeError(_OWN.format(optimizer=type(optimizer).__name__))

    def _refuse_within_backward(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if the optimizer steps parameters whose gradients are averaged after this."""
        for model in self._models:
            if not model.sync.averages_before_hooks and model.holds(optimizer):
                raise RuntimeError(
                    _WITHIN.format(optimizer=type(optimizer).__name__, model=type(model.module).__name__)
                )


def _mark(optimizer: Optimizer) -> _Mark:
    for parameter in _first(optimizer.param_groups):
        gradient = parameter.grad
        return None if gradient is None else (ref(gradient), gradient._version)
    return None


def _first(groups: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return next((group["params"] for group in groups if group["params"]), ())


_WITHIN = (
    "`{optimizer}.step()` within a backward, in a hook of a parameter of `{model}`: its gradient is averaged over the "
    "ranks later, so replicas would drift apart. Step after `fabric.backward(loss)`; or pass `strategy='fsdp'`, where "
    "a hook on a parameter gets averaged gradients."
)
_OWN = (
    "`{optimizer}.step()` with gradients that no `fabric.backward` has computed since its last step, and that differ "
    "over the ranks. What is assigned to `parameter.grad`, of `torch.autograd.grad` or of a copy of the model, comes "
    "from this rank's loss alone. Compute it by `fabric.backward(loss)`, or average it: `parameter.grad = "
    "fabric.all_reduce(gradient)`. An optimizer whose steps differ over ranks on purpose is not passed to `setup`."
)
