"""`optimizer.eval()` and `optimizer.train()`, which write other weights into the parameters, outside of a step.

Schedule-free optimizers (Defazio et al., 2024, arXiv:2405.15682) evaluate an average of the weights that they train.
Where each rank has the optimizer state of some parameters only, it can write only those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from fabric.strategies.undo import replace_attributes

_MODES = ("train", "eval")


def has_modes(optimizer: Optimizer) -> bool:
    """Whether the optimizer has the methods `train` and `eval`."""
    return all(callable(getattr(type(optimizer), name, None)) for name in _MODES)


def broadcast_after_modes(optimizer: Optimizer, broadcast: Callable[[], None]) -> Callable[[], None]:
    """Call `broadcast`, a collective, after each `train` and `eval` of an optimizer that has them: every rank calls
    these then. Returns a function that undoes it."""
    if not has_modes(optimizer):
        return lambda: None
    return replace_attributes(
        optimizer, **{name: partial(_then, getattr(optimizer, name), broadcast) for name in _MODES}
    )


def _then(method: Callable[..., Any], broadcast: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    broadcast()
    return result
