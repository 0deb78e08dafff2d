"""Modules that `fully_shard` was called on: when roots reshard, and other methods that gather parameters.

# Note [Roots are resharded after forward]
By default `fully_shard` keeps the parameters of a root gathered from forward to backward. Meanwhile `parameters()`
returns the gathered copies, while optimizers hold the shards: `zero_grad` does not reach the gradients of the shards, a
second forward uses the weights from before a step, and what is written to a copy is lost. A root that is resharded
avoids this, at the cost of one more all-gather in each backward, of the parameters that the root alone holds.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric.strategies.module.deepcopy import Hook
from fabric.strategies.module.forward import leave_uncompiled
from fabric.strategies.module.output_tensors import list_hidden_tensors, restore_output
from fabric.strategies.tensors.dtensor import as_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def fsdp_modules(module: nn.Module) -> "list[FSDPModule]":
    """The submodules that `fully_shard` was called on."""
    if all(as_sharded(parameter) is None for parameter in module.parameters()):
        return []  # and torch's FSDP need not be imported
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def reshard_roots(module: nn.Module) -> None:
    """See Note [Roots are resharded after forward]. For units that the user's own function has made."""
    units: list[Any] = fsdp_modules(module)
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    for unit in units:
        if unit not in inner:
            unit.set_reshard_after_forward(True, recurse=False)


def mark_gathering(module: nn.Module, method: str) -> None:
    """Let another method gather parameters as forward does, if `fully_shard` was called on the module."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    object.__setattr__(module, method, _then(getattr(module, method), list_hidden_tensors))
    register_fsdp_forward_method(module, method)
    object.__setattr__(module, method, _then(getattr(module, method), restore_output))


def list_hidden_tensors_after(unit: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook before that of `fully_shard`, which finds tensors in containers alone."""
    return None if isinstance(output, Tensor) else list_hidden_tensors(output)  # None: as it is


def restore_output_after(unit: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook after that of `fully_shard`: the output as the module returned it."""
    return None if isinstance(output, Tensor) else restore_output(output)


def list_hidden_tensors_of_units(module: nn.Module) -> list[RemovableHandle]:
    """Register both hooks on the units that the user's function has made, around the hooks of `fully_shard`."""
    units: list[Any] = fsdp_modules(module)
    return [
        hook
        for unit in units
        for hook in (
            unit.register_forward_hook(Hook(list_hidden_tensors_after), prepend=True),
            unit.register_forward_hook(Hook(restore_output_after)),
        )
    ]


def _then(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(function(*args, **kwargs))

    leave_uncompiled(changed)
    return changed


@final
class GatherOutsideInference:
    """Hooks that gather each unit outside of inference mode, if its first forward is within it; they then remove
    themselves. torch keeps the tensors of the first gather, and no backward takes inference tensors."""

    def __init__(self, units: Iterable[Any]) -> None:
        self._hooks = {unit: unit.register_forward_pre_hook(Hook(self.before_forward), prepend=True) for unit in units}

    def before_forward(self, unit: Any, *_: Any) -> None:
        """Gather the unit, if this is its first forward, and within inference mode."""
        if unit in self._hooks:
            self._hooks.pop(unit).remove()
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    unit.unshard()
                    unit.reshard()

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
