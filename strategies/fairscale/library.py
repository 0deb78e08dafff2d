"""What both strategies of FairScale share: availability, initial broadcast, and clipping of sharded gradients.

FairScale 0.4.13 is the last release. The private names that are used are checked at its first import.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from fabric.launchers.private_names import Names, require
from fabric.strategies.capabilities import Target
from fabric.strategies.gradients import clipping
from fabric.strategies.optimizers.elementwise import refuse_dependent
from fabric.strategies.runtime import Runtime

Owned = Callable[[Optimizer], list[Tensor]]
"""Returns the parameters of an optimizer that this rank steps. Raises RuntimeError if a gradient was not averaged."""


def why_not(strategy: str, target: Target) -> str | None:
    """None if FairScale can run; otherwise the reason, with what to install or to write."""
    if "fairscale" not in target.packages:
        return (
            f"`strategy={strategy!r}` is FairScale's, and the package `fairscale` is not installed here. "
            "`pip install 'torchfabric[fairscale]'` adds it; `strategy='fsdp'` needs no further package."
        )
    if target.accelerator.name not in ("cpu", "cuda"):
        return (
            f"`strategy={strategy!r}` is FairScale's, which runs on cpu and cuda, and not on "
            f"{target.accelerator.name!r}. Pass `strategy='fsdp'`."
        )
    return None


FULLY_SHARDED: Names = {
    "fairscale.nn.data_parallel:FullyShardedDataParallel": {
        "_lazy_init": "initialises the root first, before any submodule",
        "_free_full_params _use_fp32_param_shard": "parameters that were changed are gathered anew",
        "_rebuild_full_params _prep_grads_for_backward _use_full_params": "before each backward of a forward",
        "_post_backward_hook _post_reduction_hook _wait_for_post_backward": "which parameters a backward reduced",
        "_register_post_backward_hooks _shard_bwd_hook": "removes the hooks of the previous forward",
        "_require_backward_grad_sync": "holds synchronisation back; `no_sync` is not for one backward of several",
        "_fp32_shard _full_param_padded _orig_size _saved_grad_shard": "a parameter, sharded and gathered",
        "_cast_buffers": "leaves buffers as they are",
        "_reducer _streams": "the end of a backward, on a CPU",
    }
}
SHARDED: Names = {
    "fairscale.nn.data_parallel:ShardedDataParallel": {
        "_grad_to_be_reduced _trainable_params _bucket_flush_callback_set _work_handles _consume_work_handles": (
            "which gradients a backward reduced, and when their messages have arrived"
        ),
        "_clear_counters _should_accumulate_grads": "holds synchronisation back for one backward of several",
        "_grad_hooks": "removed when the model is released",
    },
    "fairscale.optim:OSS": {
        "_param_to_rank": "which rank steps a parameter",
        "_broadcast_params": "broadcasts the weights that each rank has stepped",
    },
}


def look_up(names: Names) -> None:
    """Import FairScale. Raises ImportError if it lacks one of the private names."""
    require("fairscale", "0.4.13", names)


@contextmanager
def root_logger_untouched() -> Iterator[None]:
    """Prevent FairScale's `logging.info(...)` from installing a handler on the root logger."""
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


def refuse_wrapped(strategy: str, module: nn.Module) -> None:
    """Raise ValueError if a module is wrapped in DistributedDataParallel: not all gradients would be averaged."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            place = f"`{name}`" if name else "The model"
            raise ValueError(_WRAPPED.format(strategy=strategy, place=place))


_WRAPPED = (
    "{place} is wrapped in `DistributedDataParallel`, and `strategy={strategy!r}` averages gradients in hooks of its "
    "own, which would not be called. Pass the module to `fabric.setup` as it is, not wrapped."
)


def refuse_optimizers(
    strategy: str, optimizers: Sequence[Optimizer], refused: Sequence[type[Optimizer]], *, flat: bool
) -> None:
    """Raise ValueError for an optimizer whose step needs gradients of other ranks. `flat`: see `refuse_dependent`."""
    for optimizer in optimizers:
        if isinstance(optimizer, (LBFGS, *refused)):
            raise ValueError(_PARTS.format(strategy=strategy, optimizer=type(optimizer).__name__))
    refuse_dependent(optimizers, _PARTS.format(strategy=strategy, optimizer="{optimizer}"), flat=flat)


_PARTS = (
    "`strategy={strategy!r}` cannot run `{optimizer}`: each rank has a part of the gradients, and this optimizer "
    "computes a parameter's step from more than that part. Use one that updates each element independently, such as "
    "AdamW, or `strategy='ddp'`."
)


def clip_norm(
    optimizers: Sequence[Optimizer], max_norm: float, norm_type: float, strict: bool, *, owned: Owned, runtime: Runtime
) -> Tensor:
    """Scale sharded gradients so that the norm over all ranks is at most the limit. Ranks: all call it."""
    for each in optimizers:
        owned(each)
    return clipping.clip_norm(optimizers, max_norm, norm_type, strict, runtime.loss_scaler, runtime.collective)


def clip_value(optimizers: Sequence[Optimizer], clip_val: float, *, owned: Owned, runtime: Runtime) -> None:
    """Clamp each gradient to `[-clip_val, clip_val]`."""
    for each in optimizers:
        owned(each)
    clipping.clip_value(optimizers, clip_val, runtime.loss_scaler)


NOT_AVERAGED = (
    "`{optimizer}` holds gradients that were not averaged over the ranks: the last backward ran within "
    "`no_backward_sync`, or gave a weight two gradients, as `checkpoint(..., use_reentrant=True)` does for a block "
    "that runs twice. Run the last micro-batch outside of it, or pass `use_reentrant=False`; `optimizer.zero_grad()` "
    "discards the gradients."
)

NEEDS_ALL = (
    "FairScale matches gradients by issue order, so each parameter must be used in every synchronised backward. "
    "Freeze unused ones with `requires_grad_(False)`, or pass `strategy='ddp_find_unused_parameters_true'`."
)
LATE = (
    "FairScale has assigned the former parameters to ranks, and these would differ between ranks. Add layers before "
    "`fabric.setup`, or pass `strategy='ddp'`."
)
UNUSED = "{count} parameters of `{name}` ({some}) got no gradient in this backward, while others did. " + NEEDS_ALL
