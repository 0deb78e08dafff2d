"""The end of the reducer of torch's DistributedDataParallel, which `ddp` and functions of `manual` use."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel


def end_reducer(parallel: DistributedDataParallel) -> None:
    """Drop DDP's reducer before the process group is destroyed. The model cannot average gradients any more."""
    # Note [The reducer ends before the process group]
    # It holds the group from C++. Were it the last to do so, the group's destructor would wait for gloo's threads while
    # holding Python's lock, which those threads want: 1 in 10 of our closing ranks hung (torch 2.13).
    # DistributedDataParallel is part of a reference cycle, so dropping it is not enough.
    for name in ("logger", "reducer"):
        vars(parallel).pop(name, None)
