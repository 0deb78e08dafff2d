"""Fully sharded data parallelism by FairScale (ZeRO-3): parameters are all-gathered for forward and backward.

The first fully sharded module (Baines et al., 2021), for code that relies on it; `fsdp` is its successor. Its wrapper
is kept beside the user's module, not around it: parameters remain the same objects, under the same names, so
optimizers made before `setup` remain valid. Between forwards a parameter is this rank's shard: one dimension, padded to
equal lengths. An operation that needs its whole gradient raises (`fsdp_shards.py`). `state_dict()` of the module and of
its submodules is a collective that returns unsharded tensors. `load_state_dict` takes unsharded tensors: of optimizers
at any time, of modules in `fabric.load` and within `fabric.gathered(model, write=True)`.

Every forward all-gathers parameters, so all ranks call it, in evaluations, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

from fabric.strategies.capabilities import Capability, Target, releases
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.fairscale.fsdp_shards import IN_SLICES, SlicedState, attach_module, attach_optimizer, holds_local
from fabric.strategies.fairscale.fsdp_wrappers import UNCOMPILABLE, FairScaleFSDPGradientSync
from fabric.strategies.fairscale.library import (
    NEEDS_ALL,
    NOT_AVERAGED,
    clip_norm,
    clip_value,
    refuse_optimizers,
    refuse_wrapped,
    why_not,
)
from fabric.strategies.gradients.bare_parameters import IN_MODULE
from fabric.strategies.module.model_checks import (
    refuse_shared_memory,
    refuse_sparse_layers,
    refuse_tied_apart,
    refuse_wrapped_in_flat,
)
from fabric.strategies.module.wrap_policy import Policy, check_policy, matching
from fabric.strategies.precision.precision import Precision
from fabric.strategies.prepared import Prepared, attach_scaler, place, replica
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import SHARDS, Layout, Runtime
from fabric.strategies.tensors.parameters import parameters_of
from fabric.strategies.undo import undo_all


@final
@dataclass(frozen=True, kw_only=True)
class FairScaleFSDPStrategy(ProcessGroupStrategy):
    """Fully sharded data parallelism by FairScale: each rank holds a shard of every parameter.

    Args:
        wrap: Submodules whose parameters are all-gathered when they run, and freed afterwards: classes, or a function
            of a module. Other parameters are gathered for the whole forward and backward. None: all
            parameters are.
        reshard_after_forward: Free the parameters of these submodules after forward, and all-gather them again for
            backward. False: more memory, less communication.
        bucket_bytes: Size of the gradients in one reduce-scatter. Each rank allocates as much during backward, for
            every model.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 after each forward that
            computes gradients.
    """

    wrap: Policy | None = None
    reshard_after_forward: bool = True
    bucket_bytes: int = 25 * 2**20
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        check_policy(self.wrap, "wrap")

    @property
    def lacks(self) -> Mapping[Capability, str]:
        always: dict[Capability, str] = {
            "unused": NEEDS_ALL,
            "compile": UNCOMPILABLE,
            "copies": IN_SLICES,
            "bare_parameters": IN_MODULE,
        }
        return always if self.wrap is None else {**always, "compile_before": UNCOMPILABLE}

    def look_for_packages(self) -> Mapping[str, str]:
        return releases("fairscale")

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        return replace(SHARDS, forward_communicates=True)

    def why_not(self, target: Target) -> str | None:
        precision = target.precision
        if precision.param_dtype not in (torch.float32, torch.float16):
            return (
                f"`precision={precision.name!r}` keeps parameters in {precision.param_dtype}, and FairScale's fully "
                "sharded module keeps them in torch.float32 or torch.float16. Pass `precision='32-true'`, "
                "`'bf16-mixed'` or `'16-mixed'`, or `strategy='fsdp'`."
            )
        return why_not("ddp_fully_sharded", target)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        parts = [part for part in matching(module, self.wrap, "wrap") if part is not module]
        refuse_tied_apart(module, {module, *parts}, "wrap")
        place(runtime, module, optimizers, move=move)
        if runtime.world.size == 1:
            return replica(runtime, module, optimizers)
        refuse_shared_memory(module)
        refuse_wrapped("ddp_fully_sharded", module)
        refuse_sparse_layers("ddp_fully_sharded", module)
        refuse_wrapped_in_flat(module, "ddp_fully_sharded")
        _refuse_dtypes(module, runtime.precision)
        refuse_optimizers("ddp_fully_sharded", optimizers, _WHOLE_MATRICES, flat=True)
        broadcast_from_rank_zero(runtime.collective, [*module.parameters(), *module.buffers()])
        sync = FairScaleFSDPGradientSync(
            runtime,
            module,
            parts,
            reshard_after_forward=self.reshard_after_forward,
            bucket_bytes=self.bucket_bytes,
            broadcast_buffers=self.broadcast_buffers,
        )
        undo = [
            attach_module(runtime.collective, module),
            *(attach_optimizer(runtime.collective, optimizer, owned) for optimizer in optimizers),
        ]
        return replace(
            replica(runtime, module, optimizers, sync, end=undo_all(undo), uncompilable=UNCOMPILABLE),
            clip_norm=partial(clip_norm, owned=owned, runtime=runtime),
            clip_value=partial(clip_value, owned=owned, runtime=runtime),
            state=SlicedState(runtime.collective),
        )

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        if runtime.world.size == 1:
            return attach_scaler(runtime.loss_scaler, optimizers)
        refuse_optimizers("ddp_fully_sharded", optimizers, _WHOLE_MATRICES, flat=True)
        for optimizer in optimizers:
            if not all(group["params"] for group in optimizer.param_groups):
                raise ValueError(_CHOSEN_BY_SHAPE.format(optimizer=type(optimizer).__name__))
        undo = [attach_optimizer(runtime.collective, optimizer, owned) for optimizer in optimizers]
        return undo_all([*undo, attach_scaler(runtime.loss_scaler, optimizers)])


_CHOSEN_BY_SHAPE = (
    "`{optimizer}` has a parameter group without parameters. After `fabric.setup` under `strategy='ddp_fully_sharded'` "
    "parameters are shards of one dimension, so groups that a program chooses by `ndim` would differ. Make the "
    "optimizer before: `model, optimizer = fabric.setup(model, optimizer)`."
)
_WHOLE_MATRICES = (Adafactor, Muon)
"""Optimizers whose step needs the unsharded shape of a parameter."""


def owned(optimizer: Optimizer) -> list[Tensor]:
    """The shards that an optimizer steps. Raises RuntimeError if a gradient was not averaged."""
    parameters = parameters_of(optimizer)
    if any(map(holds_local, parameters)):
        raise RuntimeError(NOT_AVERAGED.format(optimizer=type(optimizer).__name__))
    return parameters


def _refuse_dtypes(module: nn.Module, precision: Precision) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dtype != precision.param_dtype:
            raise ValueError(
                f"{name!r} of `{type(module).__name__}` is of {parameter.dtype}, and FairScale's fully sharded module "
                f"keeps all parameters in one dtype, here {precision.param_dtype}. Convert the model before "
                "`fabric.setup`, or pass `strategy='fsdp'`."
            )
