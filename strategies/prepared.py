"""A model that a strategy has set up: how gradients are synchronised and clipped, and its state saved.

Fields are functions that differ between strategies, so that readers need not know the strategy. Module and optimizers
are the user's own objects wherever the strategy allows it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import PLAIN, StateAccess, Stateful, uncompiled
from fabric.strategies.gradients.sync import GradientSync
from fabric.strategies.layout import Layout
from fabric.strategies.module.forward import ForwardPath


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeights:
    """The weights that an engine trains instead of the model's parameters, such as flat copies of them."""

    shards: Callable[[], list[Tensor]]
    """The trained weights of this rank, to be read and written; they include the program's changes of the model."""
    written: Callable[[], None]
    """Update the model's weights from the trained weights. Ranks: all call it."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """One model and the optimizers that were set up with it.

    # Note [What was set up lives as long as the program has it]
    The model keeps its `Prepared` alive, by `path.kept`, and so does each of its optimizers. Whoever else holds one for
    longer than a call holds it weakly, so that model, gradients and engine go when the program lets go of them.
    """

    module: nn.Module
    """The module that `setup` returns."""
    optimizers: Collection[Optimizer]
    """The optimizers that `setup` returns, in the order given. What the model keeps has a `WeakSet` of them."""
    path: ForwardPath
    """Its wrapped methods."""
    sync: GradientSync
    """What runs around forward and backward."""
    clip_norm: Callable[[Sequence[Optimizer], float, float, bool], Tensor]
    """`(optimizers, max_norm, norm_type, error_if_nonfinite)`: scale the gradients of all these optimizers so that
    their norm over all shards is at most `max_norm`; returns the norm before."""
    clip_value: Callable[[Sequence[Optimizer], float], None]
    """`(optimizers, clip_val)`: clamp each gradient to `[-clip_val, clip_val]`."""
    is_finite: Callable[[Optimizer], bool]
    """Whether the gradients with which an optimizer would step are finite, on every rank; all ranks call it."""
    release: Callable[[], None]
    """Restore the user's objects: no hook and no attribute of ours stays on them. Called after `release_optimizers`."""
    release_optimizers: Callable[[], None] = lambda: None
    """Restore the optimizers; what the optimizers keep, not the model."""
    scale_loss: Callable[[Tensor], Tensor] | None = None
    """How an engine scales the loss of this model; None: the precision's loss scaler does."""
    joins_backward: bool = True
    """Whether one backward may go through this model and others; False if `scale_loss` would scale the others too."""
    loss_scale: Stateful | None = None
    """The loss scale, if an engine has one instead of the runtime."""
    layout: Layout
    """What each rank holds of the model."""
    state: StateAccess = PLAIN
    """How the full state of the model, and of optimizers of its parameters, is saved and loaded."""

    trained: TrainedWeights | None = None
    """The weights that an engine trains; None: the model's parameters."""

    def holds(self, obj: nn.Module | Optimizer) -> bool:
        """Whether `obj` is this model, a module within or around it, or an optimizer of its present parameters."""
        if isinstance(obj, nn.Module):
            inner = uncompiled(self.module)
            return any(part is obj for part in inner.modules()) or any(part is inner for part in obj.modules())
        own = {id(parameter) for parameter in self.module.parameters()}
        return any(id(parameter) in own for group in obj.param_groups for parameter in group["params"])
