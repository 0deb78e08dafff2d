"""A model that a strategy has set up: how gradients are synchronised and clipped, and its state saved.

`Prepared` has fields, functions that differ between strategies, so that readers need not know the strategy. Module and
optimizers are the user's own objects wherever the strategy allows it. `replica` and `make_prepared` make the `Prepared`
that a strategy's `setup` returns, from a module, its optimizers and its `GradientSync`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import PLAIN, StateAccess, Stateful
from fabric.strategies.gradients.clipping import clip_norm, clip_value, gradients_are_finite
from fabric.strategies.gradients.sync import GradientSync, LocalGradientSync
from fabric.strategies.module.forward import Around, ForwardPath
from fabric.strategies.module.model_checks import refuse_meta, refuse_shared_memory
from fabric.strategies.module.output_tensors import replace_tensors
from fabric.strategies.optimizers.dtensor_steps import step_mixed_groups, sum_over_shards_in_steps
from fabric.strategies.optimizers.owners import needs_owners, refuse_shards, step_by_owners
from fabric.strategies.precision.loss_scaler import LossScaler
from fabric.strategies.precision.precision import autocast, cast_inputs, cast_module, cast_output, casts
from fabric.strategies.runtime import Layout, Runtime
from fabric.strategies.tensors.parameters import uncompiled
from fabric.strategies.undo import undo_all


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


def place(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], *, move: bool) -> None:
    """Cast the module to the precision's dtype and move it and the optimizers' state to the device, in place.

    Raises: ValueError: a tensor is on the meta device, and has no values.
    """
    refuse_meta(module)
    cast_module(runtime.precision, module)
    if move:
        module.to(runtime.device)
        for optimizer in optimizers:
            move_state(optimizer, runtime.device)


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer, if it has any, to the device of its parameters."""
    for state in optimizer.state.values():
        for name, value in state.items():
            # A step count stays where its optimizer created it: on the CPU, unless fused or capturable.
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device)


def make_contiguous(module: nn.Module) -> None:
    """Store each parameter row by row, as whoever shards it expects: some are transposed, or in `channels_last`.

    Raises: ValueError: a parameter shares memory with another tensor.
    """
    refuse_shared_memory(module)
    for parameter in module.parameters():
        if parameter.layout is torch.strided and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def replica(
    runtime: Runtime,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    sync: GradientSync | None = None,
    *,
    end: Callable[[], None] = lambda: None,
    uncompilable: str | None = None,
) -> Prepared:
    """Prepare a module that is on its device, whose forward `sync` wraps.

    `sync=None`: no gradients are synchronised, and `forward` is not wrapped unless the precision requires it.
    `end`: called on release, after the module is released. `uncompilable`: see `ForwardPath`.
    """
    path = ForwardPath(module, with_precision(runtime, sync.forward if sync else None), uncompilable=uncompilable)
    return make_prepared(runtime, module, optimizers, sync or LocalGradientSync(module), path, end)


def make_prepared(
    runtime: Runtime,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    sync: GradientSync,
    path: ForwardPath,
    *ends: Callable[[], None],
) -> Prepared:
    """The `Prepared` of every strategy, some of whose fields it may replace. `path`: the methods around `sync.forward`.

    `ends`: called on release, in this order, after the optimizers and the module are released.
    """
    scaler = runtime.loss_scaler
    return Prepared(
        module=module,
        optimizers=tuple(optimizers),
        path=path,
        sync=sync,
        layout=runtime.layout,
        clip_norm=partial(clip_norm, scaler=scaler),
        clip_value=partial(clip_value, scaler=scaler),
        is_finite=partial(gradients_are_finite, scaler=scaler, any_rank=runtime.any_rank),
        release=undo_all((path.release, sync.release, *ends)),
        release_optimizers=attach_to_steps(runtime, optimizers),
    )


def attach_to_steps(runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Attach what optimizers need whose models are set up. Returns a function that undoes it. Ranks: all.

    Raises: ValueError: an optimizer that cannot step shards, nor whole parameters one by one.
    """
    refuse_shards(optimizers)
    owned = [each for each in optimizers if needs_owners(each)]
    return undo_all(
        (
            attach_scaler(runtime.loss_scaler, optimizers),
            step_mixed_groups(each for each in optimizers if each not in owned),
            sum_over_shards_in_steps(optimizers),
            step_by_owners(runtime.collective, owned),
        )
    )


def attach_scaler(scaler: LossScaler | None, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Attach the scaler, if there is one, to the optimizers' steps. Returns a function that undoes it."""
    return undo_all(scaler.attach(optimizer) for optimizer in optimizers if scaler is not None)


def with_precision(runtime: Runtime, around: Around | None) -> Around | None:
    """`around` with autocast or casts of the precision. Ranks' generators diverge at the first call."""
    precision, device = runtime.precision, runtime.device
    inner: Around = around or (lambda function, args, kwargs: function(*args, **kwargs))
    cast_out = partial(cast_output, precision) if precision.is_mixed and precision.output_dtype is not None else None
    is_cast = casts(precision)

    if not precision.is_mixed and not is_cast and runtime.share.index == 0:
        return around  # there is nothing to do before or after forward

    def forward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime.diverge_generators()
        with autocast(precision, device) if precision.is_mixed else runtime.new_tensors:
            if is_cast:
                args, kwargs = cast_inputs(precision, (args, kwargs))
            output = inner(function, args, kwargs)
        return output if cast_out is None else replace_tensors(output, cast_out)

    return forward
