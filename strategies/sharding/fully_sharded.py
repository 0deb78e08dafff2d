"""Modules that `fully_shard` was called on: which are roots, when they reshard, and their other methods and outputs.

# Note [Roots are resharded after forward]
By default `fully_shard` keeps the parameters of a root gathered from forward to backward. Meanwhile `parameters()`
returns the gathered copies, while optimizers hold the shards: `zero_grad` does not reach the gradients of the shards, a
second forward uses the weights from before a step, and what is written to a copy is lost. A root that is resharded has
none of this, for one all-gather more in each backward, of what the root alone holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from fabric.strategies.module.copies import Hook
from fabric.strategies.module.forward import leave_uncompiled
from fabric.strategies.module.outputs import conceal, expose
from fabric.strategies.sharding.layout import fsdp_modules
from fabric.strategies.tensors.dtensor import user_class
from fabric.strategies.torch_internals import require_fully_shard
from fabric.strategies.undo import undo_all

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def roots_of(module: nn.Module) -> list[FSDPModule]:
    """The modules that `fully_shard` was called on, and that are within no other of them."""
    units: list[Any] = fsdp_modules(module)
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    return [unit for unit in units if unit not in inner]


def reshard_roots(module: nn.Module) -> None:
    """See Note [Roots are resharded after forward]. For units that the user's own function has made."""
    for root in roots_of(module):
        root.set_reshard_after_forward(True, recurse=False)


def take_as_roots(module: nn.Module) -> None:
    """Make the outermost units the roots. Otherwise the first unit that runs becomes one."""
    for root in roots_of(module):
        require_fully_shard()
        try:
            cast(Any, root)._get_fsdp_state()._lazy_init()
        except AssertionError as error:
            if "uniform original parameter dtype" in str(error):
                raise ValueError(_DTYPES.format(model=user_class(module).__name__, error=error)) from error
            raise


def expose_outputs(units: Sequence[FSDPModule]) -> Callable[[], None]:
    """Let the hooks of `fully_shard`, and no hook of the user's, see exposed outputs. Returns a function that undoes
    it."""
    return undo_all(_expose_outputs(unit) for unit in cast("Sequence[nn.Module]", units))


def _expose_outputs(unit: nn.Module) -> Callable[[], None]:
    hooks, state = unit._forward_hooks, cast(Any, unit)._get_fsdp_state()
    own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is state}

    def around(hook: Callable[..., Any]) -> Hook:
        return Hook(lambda unit, args, output: conceal(hook(unit, args, expose(output))))

    hooks.update({key: around(hook) for key, hook in own.items()})
    return lambda: hooks.update({key: hook for key, hook in own.items() if key in hooks})


def mark_gathering(module: nn.Module, method: str) -> None:
    """Make another method of a module that `fully_shard` was called on gather, as its forward does."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    object.__setattr__(module, method, _then(getattr(module, method), expose))
    register_fsdp_forward_method(module, method)
    object.__setattr__(module, method, _then(getattr(module, method), conceal))


def _then(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(function(*args, **kwargs))

    leave_uncompiled(changed)
    return changed


_DTYPES = (
    "`{model}` has trained parameters of several dtypes in one unit of `fully_shard`, which reduces the gradients of a "
    "unit together ({error}). Convert them to one dtype before `fabric.setup`; or make a unit of each module of "
    "another dtype, `FSDPStrategy(auto_wrap_policy={{ItsClass}})`; or pass `strategy='ddp'`."
)
