"""Forward and backward of one model in shards: `fully_shard` and tensor parallelism communicate; this class checks the
order of submodules, and averages gradients that they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.rank_zero import broadcast_from_rank_zero, buffers_of
from fabric.strategies.gradients.averaging import average, redistribute
from fabric.strategies.gradients.sync import INPUTS_OF_SHARDS, Finish, GradientSync, all_of
from fabric.strategies.module.initialization import UninitializedTensors
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.execution_order import ExecutionOrder
from fabric.strategies.sharding.fully_shard import GatherOutsideInference, fsdp_modules
from fabric.strategies.sharding.mesh import DATA_AXES, along, degree, unaveraged
from fabric.strategies.sharding.unreduced_gradients import UnreducedGradients
from fabric.strategies.tensors.dtensor import local_part, user_class


@final
class ShardedGradientSync(GradientSync):
    """One model. `averaging`: averages gradients that no unit reduces; None: the root is a unit, and reduces all."""

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        uninitialized: UninitializedTensors,
        averaging: MeshAveraging | None = None,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.collective, self.module = runtime.collective, module
        self.uninitialized, self.averaging = uninitialized, averaging
        self.data = runtime.collective if averaging is None else averaging.data
        self.buffered = list(module.modules()) if broadcast_buffers and runtime.world.size > 1 else []
        self.fsdp_units = units = fsdp_modules(module)
        self.refuses = INPUTS_OF_SHARDS if units else {}
        self.additions = AddedParameters(module, by_name=bool(units))
        self.gather_outside_inference = GatherOutsideInference(units)
        self.order = ExecutionOrder(runtime, module, units)
        self.reductions = UnreducedGradients(runtime, module, units)
        self.parameters = list(module.parameters())  # the shards; `fully_shard` may replace them by gathered parameters
        self._ordered = self.order.around(self._forward)

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._ordered(function, args, kwargs)

    def watch(self) -> Finish | None:
        average = self.averaging.average if self.averaging is not None and self.synced else None
        return all_of(self.order.watch(), self.reductions.watch(synced=self.synced), average)

    def parameters_held(self) -> Iterable[Tensor]:
        return self.parameters

    def release(self) -> None:
        self.reductions.release()
        self.order.release()
        self.gather_outside_inference.release()

    def _forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.uninitialized.check(self.collective)
        self.additions.refuse()
        if torch.is_inference_mode_enabled():
            self.gather_outside_inference.before_forward(self.module)  # a marked method runs no hooks of the module
        try:
            output = function(*args, **kwargs)
        except RuntimeError as error:
            if self.averaging is not None or "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RuntimeError(f"{error} {_NOT_GATHERED.format(model=user_class(self.module).__name__)}") from error
        if self.data is not None and self.synced and torch.is_grad_enabled():
            buffers = buffers_of(self.buffered)
            broadcast_from_rank_zero(self.data, buffers if self.averaging is None else map(local_part, buffers))
        return output


_NOT_GATHERED = (
    "Forward of `{model}` computed with a parameter that is in shards: the parameters of a unit are gathered when the "
    "unit is called as a module. Call `block(x)` instead of parts of it, such as `block.attention(x)` or "
    "`block.weight`; or write `FSDPStrategy(auto_wrap_policy=None)`, which gathers the whole model at once. "
    "`fabric.strategy.units(model)` has the names of the units."
)


@final
class MeshAveraging:
    """Gradient averaging of one model on a mesh. Ranks: all create it together, one for each model."""

    def __init__(self, runtime: Runtime, module: nn.Module) -> None:
        assert runtime.mesh is not None
        by_axes = unaveraged(module, runtime.mesh)
        data = tuple(axis for axis in DATA_AXES if degree(runtime.mesh, axis) > 1)
        # Ranks whose models differ (pipeline stages) may need different groups, and all ranks must create each of them.
        wanted = {axes for axes in (*by_axes, data) if axes}
        wanted = wanted.union(*runtime.collective.all_gather_object(wanted))
        groups = {axes: along(runtime.collective, runtime.mesh, axes).for_gradients() for axes in sorted(wanted)}
        self.parameters = list(module.parameters())
        self.unaveraged = [(groups[axes], parameters) for axes, parameters in by_axes.items()]
        self.data = groups[data] if data else None
        """The ranks that hold the same part of the model, and read other data; None: there is no other."""

    def average(self) -> None:
        """Average all gradients that no wrapper reduces. Ranks: all, after the backward."""
        redistribute(self.parameters)
        for collective, parameters in self.unaveraged:
            average(collective, parameters)
