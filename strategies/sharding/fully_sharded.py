"""Modules that `fully_shard` was called on: the roots among them are resharded after forward.

# Note [Roots are resharded after forward]
By default `fully_shard` keeps the parameters of a root gathered from forward to backward. Meanwhile `parameters()`
returns the gathered copies, while optimizers hold the shards: `zero_grad` does not reach the gradients of the shards, a
second forward uses the weights from before a step, and what is written to a copy is lost. A root that is resharded has
none of this, for one all-gather more in each backward, of what the root alone holds.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fabric.strategies.sharding.layout import fsdp_modules


def reshard_roots(module: nn.Module) -> None:
    """See Note [Roots are resharded after forward]. For units that the user's own function has made."""
    units: list[Any] = fsdp_modules(module)
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    for unit in units:
        if unit not in inner:
            unit.set_reshard_after_forward(True, recurse=False)
