"""What a model has become once a strategy has set it up: how gradients are synchronised, clipped, saved, and undone.

A value that carries functions: what differs between strategies is in them, so no reader asks which strategy it was.
The module and the optimizers are what the user gets back, and wherever the strategy lets us they are the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import PLAIN, StateAccess, Stateful, uncompiled
from fabric.strategies.gradients.sync import GradientSync


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One model and the optimizers that were set up with it."""

    module: nn.Module
    """What the user calls."""
    optimizers: tuple[Optimizer, ...]
    """What the user steps, in the order given."""
    sync: GradientSync
    """What is done around forward and backward."""
    clip_norm: Callable[[Optimizer, float, float, bool], Tensor]
    """`(optimizer, max_norm, norm_type, error_if_nonfinite)`: scale the gradients so that their norm over all shards
    is at most `max_norm`; gives the norm from before."""
    clip_value: Callable[[Optimizer, float], None]
    """`(optimizer, clip_val)`: clamp each gradient to `[-clip_val, clip_val]`."""
    release: Callable[[], None]
    """Give the user's objects back as they were: no hook and no attribute of ours stays on them."""
    scale_loss: Callable[[Tensor], Tensor] | None = None
    """How an engine of its own scales a loss for this model alone; None: as the precision does."""
    joins_backward: bool = True
    """Whether one backward may run through this model and others; False where `scale_loss` would scale the others."""
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
