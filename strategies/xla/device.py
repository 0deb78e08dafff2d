"""What all strategies over XLA share: moving a model, marking steps, seeds, loaders, state as CPU tensors.

XLA records operations and runs them when a step is marked (`torch_xla.sync`). Steps are marked after each optimizer
step and before each batch of a loader, so the loop is that of any other device.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from fabric.strategies.capabilities import Target
from fabric.strategies.checkpoint.state import PlainState, StateAccess
from fabric.strategies.data.transfer import move
from fabric.strategies.module.deepcopy import Hook
from fabric.strategies.precision.precision import cast_module
from fabric.strategies.prepared import attach_scaler, move_state
from fabric.strategies.runtime import Runtime
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.undo import undo_all


def refuse_accelerator(word: str, target: Target) -> str | None:
    """The error message if the accelerator is not XLA, with the command that installs it; otherwise None."""
    if target.accelerator.name == "xla":
        return None
    if "torch_xla" not in target.packages:
        return (
            f"`strategy={word!r}` needs torch-xla, which is not installed. Run `pip install 'torchfabric[xla]'`, set "
            "`PJRT_DEVICE=TPU` (or CPU, to run XLA on the processor), and write `accelerator='xla'`."
        )
    return (
        f"`strategy={word!r}` runs on devices of XLA, but the accelerator is {target.accelerator.name!r}. Set "
        "`PJRT_DEVICE=TPU` (or CPU, to run XLA on the processor), and write `accelerator='xla'`."
    )


def place(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], *, to_device: bool) -> None:
    """Cast the module to the precision's dtype and move it and the optimizers' state to the device, in place.

    Parameters remain the same objects, and tied ones remain tied. `Module.to` would make new ones: torch cannot move a
    CPU tensor to XLA in place, but can swap the contents of two tensors.
    """
    cast_module(runtime.precision, module)
    if not to_device:
        return
    for parameter in module.parameters():  # a tied parameter once
        if parameter.device != runtime.device:
            _move_parameter(parameter, runtime.device)
    moved = {buffer: buffer.to(runtime.device) for buffer in module.buffers()}
    for part in module.modules():
        part._buffers.update({name: moved[buffer] for name, buffer in part._buffers.items() if buffer is not None})
    for optimizer in optimizers:
        move_state(optimizer, runtime.device)


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    there = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        there.grad = parameter.grad.to(device)
    vars(there).update(vars(parameter))  # attributes that the user has set on it
    torch.utils.swap_tensors(parameter, there)  # type: ignore[no-untyped-call]


def prepare_module(module: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Prepare a module on the device, and its optimizers, in `Strategy.setup`. Returns a function that undoes it."""
    owners = [_own_gradients(module.parameters()), *(_own_gradients(parameters_of(one)) for one in optimizers)]
    return undo_all([_mark_steps(optimizers), _unbias_statistics(module), _keep_apart(module), *owners])


def _keep_apart(module: nn.Module) -> Callable[[], None]:
    """Give each tensor of the module a device buffer of its own, now and after each `load_state_dict`.

    torch_xla 2.9 makes the results of `copy_` and `clone` on one device share a buffer; an optimizer that changes one
    of them in place deletes it ("buffer has been deleted or donated"). Returns a function that removes the hook.
    """
    _take_buffers(module)
    after_loading = Hook(lambda part, _: _take_buffers(part))
    handle = module.register_load_state_dict_post_hook(after_loading)  # type: ignore[no-untyped-call]
    return undo_all([handle.remove])


def _take_buffers(module: nn.Module) -> None:
    from fabric.launchers.xla_internals import sharding_of

    for tensor in (*module.parameters(), *module.buffers()):
        # Not a tensor that SPMD shards: it would lose its sharding, and its buffers are never deleted.
        if tensor.device.type == "xla" and "devices" not in sharding_of(tensor):
            tensor.data = tensor.data * True  # a computed tensor has a new buffer; the values are the same bit for bit


def _own_gradients(parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Copy gradients that are views. Returns a function that removes the hooks.

    The gradient of `parameter.sum()` is an expanded scalar. PyTorch copies it; torch_xla 2.9 leaves `.grad` a view of
    the scalar, and in-place operations are wrong: the sum of two backward passes is 3 instead of 2, and 0 if clipped.
    """
    handles = []
    for parameter in parameters:
        is_trained = parameter.requires_grad
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        parameter.requires_grad_(True)  # torch accepts no hook otherwise, and a frozen parameter may be unfrozen later
        handles.append(parameter.register_hook(_own))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(is_trained)
    return undo_all([handle.remove for handle in handles])


def _own(gradient: Tensor) -> Tensor:
    return gradient.clone() if gradient._is_view() else gradient


def _unbias_statistics(module: nn.Module) -> Callable[[], None]:
    """Correct the running variance of each BatchNorm. Returns a function that removes the hooks.

    torch_xla 2.9 updates it with the biased variance of the batch (divided by n), PyTorch with the unbiased one
    (divided by n - 1).
    """
    parts = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    before: dict[nn.Module, Tensor] = {}

    def keep(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if part.training:
            before[part] = part.running_var.clone()  # type: ignore[operator]

    @torch.no_grad()
    def correct(part: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if part not in before:
            return
        kept, count = before.pop(part), inputs[0].numel() // inputs[0].shape[1]
        share = 1 / part.num_batches_tracked if part.momentum is None else part.momentum
        kept_now = part.running_var.data  # `.data`: autograd has saved the tensor, but does not use it
        kept_now += (kept_now - (1 - share) * kept) / (count - 1)

    handles = [part.register_forward_pre_hook(Hook(keep)) for part in parts]
    handles += [part.register_forward_hook(Hook(correct)) for part in parts]
    return undo_all([handle.remove for handle in handles])


def _mark_steps(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Mark a step after each step of an optimizer. Returns a function that removes the hooks."""
    return undo_all([hook_steps(optimizer, after=_mark) for optimizer in optimizers])


def prepare_optimizers(runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """The implementation of `Strategy.setup_optimizers` over XLA."""
    owners = [_own_gradients(parameters_of(one)) for one in optimizers]
    return undo_all([attach_scaler(runtime.loss_scaler, optimizers), _mark_steps(optimizers), *owners])


def _mark(*_: Any) -> None:
    import torch_xla

    torch_xla.sync()


def marked_batches(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on the device, with a step marked before each: a loop without optimizer has steps, too.

    Not torch_xla's `MpDeviceLoader`: there an error of the dataset ends the loop silently, tuples become lists, and a
    thread reads ahead, drawing from the generators of the loop (torch_xla 2.9). PJRT copies asynchronously anyway.
    """
    for batch in batches:
        _mark()
        yield move(batch, device)
    _mark()


@final
class XLAState(StateAccess):
    """State of replicas on XLA devices. `num_replicas`: see `PlainState`."""

    def __init__(self, num_replicas: int = 1) -> None:
        self._plain = PlainState(num_replicas)

    # Marked on all ranks: the recorded graph may have collectives, which reading would run on one rank.

    def read_module(self, module: nn.Module) -> dict[str, Any]:
        _mark()
        return self._plain.read_module(module)

    def write_module(self, module: nn.Module, content: dict[str, Any], *, strict: bool) -> None:
        self._plain.write_module(module, content, strict=strict)
        _mark()

    def read_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        _mark()
        return self._plain.read_optimizer(optimizer)

    def write_optimizer(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        self._plain.write_optimizer(optimizer, content)
        _mark()
