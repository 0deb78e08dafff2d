"""torch's DistributedDataParallel beside the user's module: what it wraps in its place, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel


@final
class CallModule(nn.Module):
    """Contains the user's module; it calls a given function, such as any marked method of that module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `function(*args, **kwargs)`. Not `forward`: this module has no hooks, and `nn.Module.__call__`
        takes 1 us to look for them."""
        return function(*args, **kwargs)


def end_reducer(parallel: DistributedDataParallel) -> None:
    """Drop DDP's reducer before the process group is destroyed. The model cannot average gradients afterwards."""
    # Note [The reducer ends before the process group]
    # The reducer holds the group from C++. If it were the last owner, the group's destructor would wait for gloo's
    # threads while holding the GIL, which those threads need: 1 in 10 of our closing ranks hung (torch 2.13).
    # DistributedDataParallel is part of a reference cycle, so dropping it is not enough.
    for name in ("logger", "reducer"):
        vars(parallel).pop(name, None)
