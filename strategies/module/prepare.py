"""The whole model in every process: what single_device, dp and ddp prepare.

They differ in what happens around forward and in what a backward must obey; both are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.collectives.call_check import all_say
from fabric.strategies.data.loader_check import Ranks
from fabric.strategies.data.loaders import DeviceLoader, Use, process_dataloader
from fabric.strategies.gradients.clipping import clip_norm, clip_value, move_state
from fabric.strategies.module.deferred_init import refuse_empty
from fabric.strategies.module.forward import Around, ForwardPath
from fabric.strategies.precision.forward_precision import autocast, cast_inputs, cast_module, casts
from fabric.strategies.precision.loss_scaler import LossScaler
from fabric.strategies.prepared import Prepared, Watch
from fabric.strategies.runtime import Runtime


def place(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], *, move: bool) -> None:
    """Give the module the precision's dtype and the rank's device, in place, and bring its optimizers along."""
    cast_module(runtime.precision, module)
    if move:
        module.to(runtime.device)
        for optimizer in optimizers:
            move_state(optimizer, runtime.device)


def replica(
    runtime: Runtime,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    around: Around | None = None,
    unsynced: Callable[[], AbstractContextManager[None]] = nullcontext,
    watches: Sequence[Watch] = (),
    end: Callable[[], None] = lambda: None,
    uncompilable: str | None = None,
) -> Prepared:
    """Prepare a placed module. Where neither the strategy nor the precision has to act, forward is left untouched.

    `end`: what the strategy gives back on release, after the module. `uncompilable`: see `ForwardPath`.
    """
    scaler = runtime.loss_scaler
    path = ForwardPath(module, refuse_empty(module, with_precision(runtime, around)), uncompilable=uncompilable)
    detach = attach_scaler(scaler, optimizers)

    def release() -> None:
        path.release()
        detach()
        end()

    return Prepared(
        module=module,
        optimizers=tuple(optimizers),
        backward=backward_through(scaler, watches),
        joins_backward=True,
        watches=watches,
        unsynced=unsynced,
        clip_norm=partial(clip_norm, scaler=scaler),
        clip_value=partial(clip_value, scaler=scaler),
        release=release,
    )


def share_loader(
    runtime: Runtime,
    loader: Iterable[Any],
    use: Use,
    *,
    distribute: bool,
    move: bool,
) -> DeviceLoader:
    """What `Strategy.process_dataloader` does."""
    collective = runtime.collective
    return process_dataloader(
        loader,
        use,
        share=runtime.share,
        device=runtime.device,
        distribute=distribute,
        move=move,
        launcher=runtime.world.launcher,
        ranks=Ranks(
            size=collective.size,
            broadcast=collective.broadcast_object,
            gather=collective.all_gather_object,
            same=partial(all_say, collective),
        ),
        numbers=runtime.loader_numbers,
        say=runtime.report,
        draw_apart=runtime.draw_apart,
        carry=runtime.carry,
    )


def attach_scaler(scaler: LossScaler | None, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let the scaler, if there is one, see to the optimizers' steps. Returns what undoes it."""
    undo = [scaler.attach(optimizer) for optimizer in optimizers] if scaler is not None else []

    def detach() -> None:
        for each in undo:
            each()

    return detach


def with_precision(runtime: Runtime, around: Around | None) -> Around | None:
    """What the precision does around forward, within what the strategy does. Ranks draw apart from here on."""
    precision, device = runtime.precision, runtime.device
    inner: Around = around or (lambda function, args, kwargs: function(*args, **kwargs))

    def forward_plain(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime.draw_apart()
        return inner(function, args, kwargs)

    def forward_mixed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime.draw_apart()
        with autocast(precision, device):
            return inner(function, args, kwargs)

    def forward_true(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime.draw_apart()
        with runtime.new_tensors:
            return inner(function, *cast_inputs(precision, (args, kwargs)))

    if not precision.is_mixed and not casts(precision):
        return around if runtime.share.index == 0 else forward_plain
    return forward_mixed if precision.is_mixed else forward_true


def backward_through(scaler: LossScaler | None, watches: Sequence[Watch]) -> Callable[..., None]:
    """The backward of whole models: scale the loss if the precision asks for it, and check what the watches ask."""

    def backward_alone(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # Scaled before anybody watches: scaling brings gradients that are there already to the same scale.
        scaled = loss if scaler is None else scaler.scale_loss(loss)
        checks = [check for watch in watches if (check := watch()) is not None]
        scaled.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        for check in checks:
            check()

    return backward if watches or scaler is not None else backward_alone
