"""Forward and gradient synchronisation of a model over a mesh: averages what tensor parallel and FSDP2 do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.gradients.averaging import MeshAveraging
from fabric.strategies.gradients.sync import INPUTS_OF_SHARDS, Finish, GradientSync, all_of
from fabric.strategies.module.changes import AddedParameters
from fabric.strategies.module.deferred_init import Unfilled
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder
from fabric.strategies.sharding.first_gather import FirstGather
from fabric.strategies.sharding.reductions import Reductions


@final
class ModelParallelGradientSync(GradientSync):
    """Synchronises one model that `parallelize_fn` has parallelized. A pipeline has `PipelineGradientSync`."""

    def __init__(self, runtime: Runtime, module: nn.Module, unfilled: Unfilled, *, broadcast_buffers: bool) -> None:
        self.runtime, self.module, self.unfilled = runtime, module, unfilled
        self.broadcast_buffers = broadcast_buffers
        self.averaging = MeshAveraging(runtime, module)
        units = self.averaging.sharded
        self.refuses = INPUTS_OF_SHARDS if units else {}
        self.additions = AddedParameters(module, by_name=bool(units))
        self.first_gather = FirstGather(units)
        self.order = ExecutionOrder(runtime, module, units)
        self.reductions = Reductions(runtime, module, units)
        self._ordered = self.order.around(self._forward)

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._ordered(function, args, kwargs)

    @property
    def averages_before_hooks(self) -> bool:
        return not self.averaging.unaveraged

    def set_synced(self, synced: bool) -> None:
        self.synced = synced
        self.averaging.set_synced(synced)

    def watch(self) -> Finish | None:
        reduced = self.reductions.watch(synced=self.averaging.synced)
        return all_of(self.order.watch(), reduced, self.averaging.watch())

    def parameters_held(self) -> Iterable[Tensor]:
        return self.averaging.parameters

    def release(self) -> None:
        self.reductions.release()
        self.order.release()
        self.first_gather.release()

    def _forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.unfilled.check(self.runtime.collective)
        self.additions.refuse()
        if torch.is_inference_mode_enabled():
            self.first_gather.before_forward(self.module)  # a marked method runs no hooks of the module
        output = function(*args, **kwargs)
        if self.broadcast_buffers and self.synced and torch.is_grad_enabled():
            self.averaging.broadcast_buffers()
        return output
