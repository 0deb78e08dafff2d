"""Weights that the program itself updates with gradients of `torch.autograd.grad`, which are not averaged.

`torch.autograd.grad(loss, parameters)` returns gradients of this rank's loss alone. To read them is right (the weight
of a loss in a GAN, second derivatives), and so is an update with averages of them; an update with them alone makes
replicas drift apart. So a hook on some parameters sees that a gradient was computed without a backward of fabric. If
the parameter was changed since the last one, and again since the one before, the ranks compare it. It raises if they
differ three times in a row: a program may move weights to measure a loss there, on each rank to another place, and move
them back. Cost: 0.4 us for each hook and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.strategies.collectives.call_check import all_equal
from fabric.strategies.digest import digest_of_all
from fabric.strategies.runtime import Runtime
from fabric.strategies.undo import undo_all

_NUM_ALLOWED = 1
"""After a single change the program may have loaded other weights."""
_NUM_DIFFERENT = 3
"""How many times in a row a parameter differs over the ranks before it raises."""


def refuse_updates_by_hand(runtime: Runtime, module: nn.Module) -> Callable[[], None]:
    """Watch the first and the last parameter of a model that all ranks hold whole. Returns what removes the hooks."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    watched = dict.fromkeys((*parameters[:1], *parameters[-1:]))
    return undo_all(_Watched(runtime, module, each).handle.remove for each in watched)


@final
class _Watched:
    """One parameter, and what was seen of it when its gradient was last computed without `fabric.backward`."""

    def __init__(self, runtime: Runtime, module: nn.Module, parameter: Tensor) -> None:
        self._runtime, self._module, self._parameter = runtime, module, parameter
        self._version = -1
        self._num_backwards = self._num_changes = 0
        self.handle: RemovableHandle = parameter.register_hook(self._computed)  # type: ignore[no-untyped-call]

    def _computed(self, gradient: Tensor) -> None:
        if self._runtime.backward.is_running or torch.is_grad_enabled():  # the second: the result goes into a loss
            return
        version, number = self._parameter._version, self._runtime.loader_numbers.num_backwards
        before, earlier = self._version, self._num_backwards
        self._version, self._num_backwards = version, number
        if before == -1 or number != earlier:
            self._num_changes = 0
            return
        self._num_changes += version != before
        if version != before and self._num_changes > _NUM_ALLOWED:
            if all_equal(self._runtime.collective, str(digest_of_all([self._parameter]))):
                self.handle.remove()
            elif self._num_changes == _NUM_ALLOWED + _NUM_DIFFERENT:
                raise RuntimeError(_BY_HAND.format(model=type(self._module).__name__))


_BY_HAND = (
    "Weights of `{model}` are changed with gradients that `torch.autograd.grad` or a plain backward computed of this "
    "rank's loss alone: the ranks would train different models. Call `fabric.backward(loss)` and an optimizer, or "
    "average the gradients first: `gradient = fabric.all_reduce(gradient)`."
)
