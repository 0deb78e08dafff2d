"""Refuses a step with gradients that the program has changed since their backward.

Each rank has the gradients of its own part alone. So a norm over them differs over ranks, and `clip_grad_norm_` of
torch would scale each part by another factor, which nothing else notices.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from fabric.strategies.tensors.parameters import parameters_of

_left = WeakTensorKeyDictionary()
"""By parameter: its gradient as fabric has left it, which may be freed, and the version of that."""


def note(parameters: Iterable[Tensor]) -> None:
    """Record the present gradients of these parameters: whatever changed them was fabric."""
    for parameter in parameters:
        gradient = parameter.grad
        _left[parameter] = None if gradient is None else (TensorWeakRef(gradient), gradient._version)


def note_all(optimizer: Optimizer) -> None:
    """Record the present gradients of the parameters of an optimizer."""
    note(parameters_of(optimizer))


def refuse_changed(optimizer: Optimizer) -> None:
    """Raise RuntimeError if a gradient was changed in place since it was recorded, other than by zeroing it."""
    for parameter in parameters_of(optimizer):
        gradient, left = parameter.grad, _left.get(parameter)  # type: ignore[no-untyped-call]
        if gradient is None or left is None:
            continue
        known, version = left
        if known() is gradient and gradient._version != version and gradient.count_nonzero():
            raise RuntimeError(_CHANGED.format(optimizer=type(optimizer).__name__))


_CHANGED = (
    "`{optimizer}` holds gradients that were changed after `fabric.backward`. Under FairScale's strategies each rank "
    "has the gradients of its own part of the parameters, and a norm over them is not that of the model. To clip, "
    "call `fabric.clip_gradients(model, optimizer, max_norm=...)`; for other changes pass `strategy='fsdp'`."
)
