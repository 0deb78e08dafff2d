"""Weights that the program itself updates with gradients of `torch.autograd.grad`, which nobody averages.

`torch.autograd.grad(loss, parameters)` returns gradients of this rank's loss alone. To read them is right (the weight
of a loss in a GAN, second derivatives), and so is an update with averages of them; an update with them alone makes
replicas drift apart. So a hook on some parameters sees that a gradient was computed without a backward of fabric, and
compares what happened since the last one: the weight was changed, and less was sent than it has elements. It raises
when this has happened twice. Cost: 0.4 us for each hook and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.flight_recorder import FlightRecorder
from fabric.strategies.runtime import Runtime

_NUM_ALLOWED = 1
"""After a single change the program may have loaded other weights."""
_NUM_COMPARED = 1024
"""Elements that are compared: a weight that was moved and moved back, to measure a loss there, has not changed."""


def refuse_updates_by_hand(runtime: Runtime, module: nn.Module, parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Watch the first and the last of these parameters, which ranks hold whole. Returns what removes the hooks."""
    handles = [_Watched(runtime, module, each).handle for each in dict.fromkeys((*parameters[:1], *parameters[-1:]))]

    def release() -> None:
        for handle in handles:
            handle.remove()

    return release


@final
class _Watched:
    """One parameter, and what was seen of it when its gradient was last computed without `fabric.backward`."""

    def __init__(self, runtime: Runtime, module: nn.Module, parameter: Tensor) -> None:
        self._runtime, self._module, self._parameter = runtime, module, parameter
        self._before: tuple[int, Tensor] | None = None
        self._since_ns = self._num_backwards = self._num_changes = 0
        self.handle: RemovableHandle = parameter.register_hook(self._computed)  # type: ignore[no-untyped-call]

    def _computed(self, gradient: Tensor) -> None:
        if self._runtime.backward.is_running or torch.is_grad_enabled():  # the second: the result goes into a loss
            return
        number, since_ns, before = self._runtime.loader_numbers.num_backwards, self._since_ns, self._before
        version, values = self._parameter._version, self._parameter.detach().flatten()[:_NUM_COMPARED]
        is_first = before is None or number != self._num_backwards
        if before is not None and not is_first and (version == before[0] or torch.allclose(values, before[1])):
            return
        self._before, self._num_backwards, self._since_ns = (version, values.clone()), number, time.time_ns()
        if is_first:
            self._num_changes = 0
            return
        recorder = FlightRecorder()
        if recorder.num_elements("", since_ns, self._since_ns) >= self._parameter.numel():
            self.handle.remove()  # the program, or `loss.backward()` of a wrapper, averages
        elif recorder.num_elements("", 0, self._since_ns):  # it records
            self._num_changes += 1
            if self._num_changes > _NUM_ALLOWED:
                raise RuntimeError(_BY_HAND.format(model=type(self._module).__name__))


_BY_HAND = (
    "Weights of `{model}` are changed with gradients that `torch.autograd.grad` or a plain backward computed of this "
    "rank's loss alone: the ranks would train different models. Call `fabric.backward(loss)` and an optimizer, or "
    "average the gradients first: `gradient = fabric.all_reduce(gradient)`."
)
