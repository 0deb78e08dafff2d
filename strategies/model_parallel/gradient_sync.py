"""Forward and gradient synchronisation of a model over a mesh: averages what tensor parallel and FSDP2 do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.gradients.averaging import MeshAveraging
from fabric.strategies.gradients.sync import Finish, GradientSync, all_of
from fabric.strategies.module.changes import Additions, GatheredFlags
from fabric.strategies.module.deferred_init import Unfilled
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder
from fabric.strategies.sharding.freed import explain_freed
from fabric.strategies.sharding.gathered import Gathered, mark_gathering, take_as_root
from fabric.strategies.sharding.other_data import OtherData
from fabric.strategies.sharding.same_gradients import SameGradients


@final
class ModelParallelGradientSync(GradientSync):
    """Synchronises one model that `parallelize_fn` has parallelized. A pipeline has `PipelineGradientSync`."""

    def __init__(self, runtime: Runtime, module: nn.Module, unfilled: Unfilled, *, broadcast_buffers: bool) -> None:
        self.runtime, self.module, self.unfilled = runtime, module, unfilled
        self.broadcast_buffers = broadcast_buffers
        self.averaging = MeshAveraging(runtime, module)
        units = self.averaging.sharded
        self.additions = Additions(module, by_name=bool(units))
        self.flags = GatheredFlags(module) if units else None
        self.gathered = Gathered(module, units)
        self.other_data = OtherData(module, known={each.sharded_param for each in self.gathered.params()})
        self.order = ExecutionOrder(runtime, module, units)
        take_as_root(module, units)
        self.same = SameGradients(runtime, module, self.gathered)
        self._ordered = self.order.around(self._forward)

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._ordered(function, args, kwargs)

    @property
    def averages_before_hooks(self) -> bool:
        return not self.averaging.unaveraged

    def mark(self, method: str) -> None:
        """Make another method all-gather parameters as forward does, if `fully_shard` was called on the model."""
        if self.averaging.sharded:
            mark_gathering(self.module, method, self.gathered)

    def set_synced(self, synced: bool) -> None:
        self.synced = synced
        self.averaging.set_synced(synced)

    def watch(self) -> Finish | None:
        find_unreduced = self.gathered.watch()  # first: it may clear gradients
        return all_of(self.order.watch(), self.same.watch(), self.averaging.watch(), find_unreduced)

    def explain(self, error: RuntimeError) -> str | None:
        return explain_freed(error, self.module)

    def parameters_held(self) -> Iterable[Tensor]:
        return self.averaging.parameters

    def release(self) -> None:
        self.gathered.release()
        self.same.release()
        self.order.release()
        self.averaging.release()

    def _forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.gathered.refuse_bypassed(function)
        self.unfilled.check(self.runtime.collective)
        self.additions.refuse()
        self.other_data.refuse()
        if self.flags is not None:
            self.flags.update()
        output = function(*args, **kwargs)
        if self.broadcast_buffers and self.synced and torch.is_grad_enabled():
            self.averaging.broadcast_buffers()
        return output
