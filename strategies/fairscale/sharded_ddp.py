"""Data parallelism with the gradients and optimizer state of each parameter on one rank only (ZeRO-2).

FairScale's OSS assigns parameters to ranks, ShardedDataParallel reduces each gradient to its owner during backward (Xu
et al., 2020; Rajbhandari et al., SC 2020). The optimizer is the user's own: after a synchronised backward a rank has
gradients of the parameters that it owns, and None for others, so the optimizer steps, and has state for, only those; a
hook on its `step` then broadcasts the new values. `optimizer.state_dict()` is a collective that gathers the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.capabilities import Capability
from fabric.strategies.fairscale.changed_gradients import note_all
from fabric.strategies.fairscale.library import (
    NEEDS_ALL,
    clip_norm,
    clip_value,
    refuse_optimizers,
    refuse_wrapped,
    why_not,
)
from fabric.strategies.fairscale.oss import FairScaleShardedGradientSync, NoOwnersGradientSync
from fabric.strategies.gradients.bare_parameters import IN_MODULE
from fabric.strategies.module.buffers import broadcast_from_rank_zero
from fabric.strategies.module.prepare import place, replica
from fabric.strategies.module.sparse_layers import refuse_sparse_layers
from fabric.strategies.prepared import Prepared
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.owners import OwnersState
from fabric.strategies.target import Target, releases
from fabric.strategies.tensors.parameters import name_some, parameters_of


@final
@dataclass(frozen=True, kw_only=True)
class FairScaleShardedStrategy(ProcessGroupStrategy):
    """Data parallelism with gradients and optimizer state distributed over the ranks by parameter."""

    in_shards: ClassVar[bool] = True
    broadcast_buffers: bool = True
    """Broadcast buffers (BatchNorm statistics) from rank 0 after each forward that computes gradients."""

    @property
    def lacks(self) -> Mapping[Capability, str]:
        return {
            "unused": NEEDS_ALL,
            "later_optimizers": _LATER,
            "joint_optimizer": _LATER,
            "bare_parameters": IN_MODULE,
        }

    def look_for_packages(self) -> Mapping[str, str]:
        return releases("fairscale")

    def why_not(self, target: Target) -> str | None:
        return why_not("ddp_sharded", target)

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        _refuse_parameters(module, optimizers)
        place(runtime, module, optimizers, move=move)
        if runtime.world.size == 1:
            return replica(runtime, module, optimizers)
        refuse_wrapped("ddp_sharded", module)
        refuse_sparse_layers("ddp_sharded", module)
        refuse_optimizers("ddp_sharded", optimizers, (), flat=False)
        if runtime.loss_scaler is not None:
            runtime.loss_scaler.when_rescaled = note_all
        broadcast_from_rank_zero(runtime.collective, [*module.parameters(), *module.buffers()])
        if not optimizers:
            return replica(runtime, module, optimizers, NoOwnersGradientSync(module))
        sync = FairScaleShardedGradientSync(
            runtime.collective, module, optimizers, broadcast_buffers=self.broadcast_buffers
        )
        return replace(
            replica(runtime, module, optimizers, sync),
            clip_norm=partial(clip_norm, owned=sync.owned, collective=runtime.collective, scaler=runtime.loss_scaler),
            clip_value=partial(clip_value, owned=sync.owned, scaler=runtime.loss_scaler),
            state=OwnersState(runtime.collective),
        )

    def setup_optimizers(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        raise ValueError(_LATER)


def _refuse_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for parameters that are not the module's, in two optimizers, or of several dtypes."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    seen: set[Tensor] = set()
    for optimizer in optimizers:
        parameters, word = parameters_of(optimizer), type(optimizer).__name__
        strangers = sum(parameter not in names for parameter in parameters)
        if strangers:
            raise ValueError(
                f"`{word}` holds {strangers} parameters that are not of `{type(module).__name__}`. Under "
                "`strategy='ddp_sharded'` an optimizer is set up with the one model whose parameters it holds: make "
                "one for each model, and write `fabric.setup(model, optimizer)` for each."
            )
        twice = [names[parameter] for parameter in parameters if parameter in seen]
        if twice:
            raise ValueError(
                f"{len(twice)} parameters of `{type(module).__name__}` ({name_some(twice)}) are in two optimizers. "
                "Under `strategy='ddp_sharded'` each parameter has one: leave it in one of them, or pass "
                "`strategy='ddp'`."
            )
        dtypes = sorted({str(parameter.dtype) for parameter in parameters if parameter.requires_grad})
        if len(dtypes) > 1:
            raise ValueError(
                f"`{word}` holds parameters of {' and '.join(dtypes)}. FairScale packs those of one optimizer "
                "into one buffer, which has one dtype: make an optimizer for each, or pass `strategy='ddp'`."
            )
        seen.update(parameters)


_LATER = (
    "`fabric.setup_optimizers(...)` under `strategy='ddp_sharded'`: which rank owns a parameter is decided when its "
    "model is set up, from the optimizer that holds it. Make the optimizer first, and write `model, optimizer = "
    "fabric.setup(model, optimizer)`."
)
