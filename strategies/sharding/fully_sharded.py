"""Modules that `fully_shard` was called on: when roots reshard, and other methods that gather parameters.

# Note [Roots are resharded after forward]
By default `fully_shard` keeps the parameters of a root gathered from forward to backward. Meanwhile `parameters()`
returns the gathered copies, while optimizers hold the shards: `zero_grad` does not reach the gradients of the shards, a
second forward uses the weights from before a step, and what is written to a copy is lost. A root that is resharded has
none of this, for one all-gather more in each backward, of what the root alone holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fabric.strategies.module.forward import leave_uncompiled
from fabric.strategies.module.outputs import conceal, expose
from fabric.strategies.sharding.layout import fsdp_modules


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

    object.__setattr__(module, method, _then(getattr(module, method), expose))
    register_fsdp_forward_method(module, method)
    object.__setattr__(module, method, _then(getattr(module, method), conceal))


def _then(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(function(*args, **kwargs))

    leave_uncompiled(changed)
    return changed
