"""Release of the reducer of torch's DistributedDataParallel, for `ddp` and for functions of `manual`."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel


def end_reducer(parallel: DistributedDataParallel) -> None:
    """Drop DDP's reducer before the process group is destroyed. The model cannot average gradients afterwards."""
    # Note [The reducer ends before the process group]
    # The reducer holds the group from C++. If it were the last owner, the group's destructor would wait for gloo's
    # threads while holding the GIL, which those threads need: 1 in 10 of our closing ranks hung (torch 2.13).
    # DistributedDataParallel is part of a reference cycle, so dropping it is not enough.
    for name in ("logger", "reducer"):
        vars(parallel).pop(name, None)
