"""Checks at the step of every optimizer, where several ranks train one model: with gradients that nobody averages.

Two programs that are right in one process. An optimizer that steps in a hook of its parameter, within the backward,
does so before most strategies average gradients. And gradients that the program assigns (`parameter.grad = ...`, of
`torch.autograd.grad` or of a copy of the model) are this rank's own. Torch calls a hook before each step of any
optimizer. Cost: 0.6 us for each step.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from contextlib import ExitStack
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric.strategies.collectives.flight_recorder import FlightRecorder
from fabric.strategies.gradients.clipping import parameters_of
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.dtensor import local_part
from fabric.strategies.torch_internals import current_graph_task_id

_Mark: TypeAlias = tuple[int, int] | None
"""The identity and the version of an optimizer's first gradient."""
_NEVER: tuple[int, _Mark, int] = (-1, None, 0)


@final
class StepChecks:
    """What one fabric knows of the steps of its optimizers. `prepared`: those that were set up."""

    def __init__(self, runtime: Runtime, prepared: Container[Optimizer], undo: ExitStack) -> None:
        self._runtime, self._prepared = runtime, prepared
        self._models: list[Prepared] = []
        self._last: WeakKeyDictionary[Optimizer, tuple[int, _Mark, int]] = WeakKeyDictionary()
        self._averaging: WeakSet[Optimizer] = WeakSet()
        undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def add(self, model: Prepared) -> None:
        """Take in a model that was set up."""
        self._models.append(model)
        number, now_ns = self._runtime.loader_numbers.num_backwards, time.time_ns()
        self._last.update(dict.fromkeys(model.optimizers, (number, None, now_ns)))

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if current_graph_task_id() != -1:
            self._refuse_within_backward(optimizer)
        if optimizer not in self._prepared:
            return
        number, mark = self._runtime.loader_numbers.num_backwards, _mark(optimizer)
        last = self._last.get(optimizer, _NEVER)
        self._last[optimizer] = number, mark, time.time_ns()
        if number != last[0] or mark is None or mark == last[1] or optimizer in self._averaging:
            return
        if number and last[1] is not None and mark[0] == last[1][0]:  # what a backward averaged, changed in place
            return
        self._refuse_own(optimizer, last[2])

    def _refuse_within_backward(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if the optimizer steps parameters whose gradients are averaged after this."""
        for model in self._models:
            if not model.sync.averages_before_hooks and model.holds(optimizer):
                raise RuntimeError(
                    _WITHIN.format(optimizer=type(optimizer).__name__, model=type(model.module).__name__)
                )

    def _refuse_own(self, optimizer: Optimizer, since_ns: int) -> None:
        """Raise RuntimeError if the ranks have sent less than the gradients since the last step."""
        gradients = [local_part(each.grad) for each in parameters_of(optimizer) if each.grad is not None]
        if not any(gradient.count_nonzero() for gradient in gradients):
            return
        recorder, now_ns = FlightRecorder(), time.time_ns()
        if recorder.num_elements("", since_ns, now_ns) >= sum(gradient.numel() for gradient in gradients):
            self._averaging.add(optimizer)  # `loss.backward()` of a backend, or the program does
        elif recorder.num_elements("", 0, now_ns):  # it records
            raise RuntimeError(_OWN.format(optimizer=type(optimizer).__name__))


def _mark(optimizer: Optimizer) -> _Mark:
    for parameter in _first(optimizer.param_groups):
        gradient = parameter.grad
        return None if gradient is None else (id(gradient), gradient._version)
    return None


def _first(groups: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return next((group["params"] for group in groups if group["params"]), ())


_WITHIN = (
    "`{optimizer}.step()` within a backward, in a hook of a parameter of `{model}`: its gradient is averaged over the "
    "ranks later, so replicas would drift apart. Step after `fabric.backward(loss)`; or pass `strategy='fsdp'`, where "
    "a hook on a parameter gets averaged gradients."
)
_OWN = (
    "`{optimizer}.step()` with gradients that no `fabric.backward` has computed since its last step, and that were not "
    "averaged over the ranks: what is assigned to `parameter.grad`, of `torch.autograd.grad` or of a copy of the model,"
    " comes from this rank's loss alone. Compute it by `fabric.backward(loss)`, or average it: `parameter.grad = "
    "fabric.all_reduce(gradient)`. An optimizer whose steps differ over ranks on purpose is not passed to `setup`."
)
