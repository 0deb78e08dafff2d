"""What a model has become once a strategy has set it up: how to run backward, hold back the sync, clip, and undo.

A value that carries functions: what differs between strategies is in them, so no reader asks which strategy it was.
The module and the optimizers are what the user gets back, and wherever the strategy lets us they are the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import PLAIN, StateAccess, Stateful, uncompiled

Watch: TypeAlias = Callable[[], Callable[[], None] | None]
"""Called before a backward. What it gives is called after, and finishes what the backward left to do, or raises
RuntimeError where its gradients are not what they should be. None: there is nothing to do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One model and the optimizers that were set up with it."""

    module: nn.Module
    """What the user calls."""
    optimizers: tuple[Optimizer, ...]
    """What the user steps, in the order given."""
    backward: Callable[..., None]
    """`(loss, *args, **kwargs)`: compute gradients, averaged over the ranks that share the model's data."""
    joins_backward: bool
    """Whether one backward may run through this model and others; False where an engine of its own must run it."""
    watches: Sequence[Watch]
    """Called before a backward, in this order."""
    unsynced: Callable[[], AbstractContextManager[None]]
    """A context in which gradients stay on the rank that computed them. On exit all is as before."""
    clip_norm: Callable[[Optimizer, float, float, bool], Tensor]
    """`(optimizer, max_norm, norm_type, error_if_nonfinite)`: scale the gradients so that their norm over all shards
    is at most `max_norm`; gives the norm from before."""
    clip_value: Callable[[Optimizer, float], None]
    """`(optimizer, clip_val)`: clamp each gradient to `[-clip_val, clip_val]`."""
    release: Callable[[], None]
    """Give the user's objects back as they were: no hook and no attribute of ours stays on them."""
    loss_scale: Stateful | None = None
    """The scale of losses, where an engine of its own has one instead of the runtime."""
    state: StateAccess = PLAIN
    """How the whole state of the model, and of optimizers of its parameters, is saved and loaded."""

    def holds(self, obj: nn.Module | Optimizer) -> bool:
        """Whether `obj` is this model, a part of it, or an optimizer of its parameters as they are now."""
        if isinstance(obj, nn.Module):
            return any(part is obj for part in uncompiled(self.module).modules())
        own = {id(parameter) for parameter in self.module.parameters()}
        return any(id(parameter) in own for group in obj.param_groups for parameter in group["params"])
