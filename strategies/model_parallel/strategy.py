"""`ModelParallelStrategy`: tensor, sharded data, context and pipeline parallelism over a mesh of ranks.

The user's function parallelizes the model with PyTorch's own APIs; the strategy makes the mesh, and the numbers equal
those of one process: weights are broadcast from rank 0, gradients are averaged along each axis whose ranks have
different data and that no wrapper averages (in `fabric.backward`), norms are computed over all shards, data is
distributed along the data axes alone, and an optimizer that was made before `setup` holds the new parameters.

    def parallelize(model, mesh):
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])

    Fabric(devices=8, strategy=ModelParallelStrategy(parallelize_fn=parallelize, data=2, shard=2, tensor=2))
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.capabilities import Capability, Target
from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.gradients.bare_parameters import IN_MODULE
from fabric.strategies.gradients.clipping import clip_norm
from fabric.strategies.model_parallel.pipeline.options import Pipeline
from fabric.strategies.model_parallel.pipeline.schedule import PipelineGradientSync, run_whole
from fabric.strategies.model_parallel.pipeline.split import assign, drop_other_stages, split_model
from fabric.strategies.model_parallel.pipeline.state import PipelineState, WholeModel
from fabric.strategies.module.deepcopy import IN_SHARDS, IN_STAGES, refuse_copies
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.module.initialization import UninitializedTensors
from fabric.strategies.module.model_checks import refuse_sharded, refuse_sparse_layers
from fabric.strategies.optimizers.owners import refuse_owners, sharded_state
from fabric.strategies.optimizers.rebinding import rebinding
from fabric.strategies.options import check_function
from fabric.strategies.precision.precision import cast_module
from fabric.strategies.prepared import Prepared, make_contiguous, make_prepared, move_state, place, with_precision
from fabric.strategies.process_group_strategy import ProcessGroupStrategy
from fabric.strategies.runtime import SHARDS, Layout, Runtime
from fabric.strategies.sharding.fully_shard import list_hidden_tensors_of_units, mark_gathering, reshard_roots
from fabric.strategies.sharding.mesh import COPIES, Degree, Parallelize, along, check_written, complete, parallelize
from fabric.strategies.sharding.sharded_gradient_sync import MeshAveraging, ShardedGradientSync
from fabric.strategies.sharding.sharded_state import ShardedState
from fabric.strategies.single_device import SingleDeviceStrategy
from fabric.strategies.strategy import Strategy
from fabric.strategies.tensors.dtensor import as_sharded
from fabric.strategies.tensors.parameters import name_some, uncompiled
from fabric.strategies.tensors.wrapper_subclass import frozen_wrapped
from fabric.strategies.tensors.wrapper_subclass import move as move_tensor


@final
@dataclass(frozen=True, kw_only=True)
class ModelParallelStrategy(ProcessGroupStrategy):
    """A mesh of ranks with named axes, over which `parallelize_fn(model, mesh)` parallelises the model in place.

    The function may call `parallelize_module` and `distribute_tensor` with `mesh["tensor"]`, `fully_shard` with
    `mesh["shard"]` or `mesh["data", "shard"]`, and `compile`; it may return the model, or None. The mesh has all axes,
    also those of degree 1. A degree is a number of ranks; one of them may be "auto": the remaining ranks.

    Args:
        parallelize_fn: `parallelize_fn(model, mesh)`, called by `setup` on every rank after weights were broadcast
            from rank 0.
        data: Number of replicas, each with samples of its own.
        shard: Number of ranks with a shard of each parameter and samples of their own, for `fully_shard`.
        context: Number of ranks with different positions of the same sequences, for `context_attention`.
        tensor: Number of ranks that compute a part of each layer on the same samples, for `parallelize_module`.
        pipeline: The stages of pipeline parallelism, and their schedule: `Pipeline(...)`.
        reshard_roots: Free the parameters of the outermost `fully_shard` modules after forward, as those of inner
            ones. False: as the function wrote it; by torch's default they stay gathered until backward. See
            `FSDPStrategy.reshard_after_forward` for the consequences.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from the first data rank after each
            forward that computes gradients.
    """

    initializes_meta: ClassVar[bool] = True
    parallelize_fn: "Parallelize | None" = None
    data: Degree = 1
    shard: Degree = 1
    context: Degree = 1
    tensor: Degree = 1
    pipeline: Pipeline | None = None
    reshard_roots: bool = True
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        check_function(self, "parallelize_fn", "parallelize_fn(model, mesh)")
        check_written(self._written())

    @property
    def lacks(self) -> Mapping[Capability, str]:
        copies = self.pipeline is not None or self.context != 1 or self.tensor != 1
        always: dict[Capability, str] = {"copies": IN_SHARDS if self.pipeline is None else IN_STAGES}
        if self.pipeline is not None:
            always["bare_parameters"] = IN_MODULE
        return {**always, "gather_gradients": COPIES} if copies else always

    def in_one_process(self) -> str | Strategy:
        return "auto" if self.pipeline is None else SingleDeviceStrategy(run=partial(run_whole, self.pipeline))

    def layout(self, degrees: Mapping[str, int]) -> Layout:
        return replace(SHARDS, forward_communicates=degrees.get("shard", 1) > 1)

    @property
    def needs_function(self) -> bool:
        return self.parallelize_fn is None and self.pipeline is None

    def why_not(self, target: Target) -> str | None:
        if self.needs_function:
            return (
                "`strategy='model_parallel'` has no function that parallelises the model. Write "
                "`strategy=ModelParallelStrategy(parallelize_fn=function, tensor=2)`, from `fabric.strategies`, with a "
                "`function(model, mesh)` that calls `parallelize_module(model, mesh['tensor'], plan)` or "
                "`fully_shard(model, mesh=mesh['shard'])`."
            )
        return None

    def degrees(self, size: int, num_nodes: int) -> dict[str, int]:
        return complete({"pipeline": 1 if self.pipeline is None else self.pipeline.degree, **self._written()}, size)

    def has_own_data(self, axis: str) -> bool:
        return axis in ("data", "shard")

    def setup(self, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool) -> Prepared:
        if self.pipeline is not None:
            return self._pipelined(self.pipeline, runtime, module, optimizers, move)
        inner = uncompiled(module)
        refuse_sharded(inner, "Leave that to `parallelize_fn`, which `setup` calls once they are.")
        uninitialized = UninitializedTensors(inner)
        with rebinding(inner, optimizers):
            place_and_broadcast(runtime, inner, optimizers, move=move)
            result = self._parallelize(runtime, inner)
            uninitialized.fill_all(inner, runtime.device, runtime.collective)
        refuse_sparse_layers("model_parallel", inner, sharded=True)
        averaging = MeshAveraging(runtime, inner)
        sync = ShardedGradientSync(runtime, inner, uninitialized, averaging, broadcast_buffers=self.broadcast_buffers)
        path = ForwardPath(inner, with_precision(runtime, sync.forward), partial(mark_gathering, inner))
        is_sharded = any(as_sharded(parameter) is not None for parameter in inner.parameters())
        ends = [
            *(hook.remove for hook in list_hidden_tensors_of_units(inner)),
            *([refuse_copies(inner, IN_SHARDS)] if is_sharded else []),
        ]
        made = make_prepared(runtime, module if result is inner else result, optimizers, sync, path, *ends)
        layout = replace(runtime.layout, averages_before_hooks=not averaging.unaveraged)
        return replace(made, layout=layout, state=sharded_state(runtime))

    def _pipelined(
        self, options: Pipeline, runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], move: bool
    ) -> Prepared:
        """Split the model, keep this rank's stages, and parallelise them. Ranks: all of the mesh call it.

        Weights are broadcast from rank 0 while every rank still has the whole model, and only the stages of this rank
        are moved to its device.
        """
        mesh, inner = runtime.mesh, uncompiled(module)
        assert mesh is not None
        assert mesh.mesh_dim_names is not None
        line = along(runtime.collective, mesh, ("pipeline",))
        peers = along(runtime.collective, mesh, [axis for axis in mesh.mesh_dim_names if axis != "pipeline"])
        whole = WholeModel(inner)
        uninitialized = UninitializedTensors(inner)
        all_stages = split_model(inner, options)
        stages = [all_stages[index] for index in options.stages_of(line.rank)]
        if runtime.world.size > 1:
            broadcast_from_rank_zero(runtime.collective, _with_values(inner))
        drop_other_stages(inner, stages)
        whole.leave(optimizers)
        with rebinding(inner, optimizers):
            # `init_weights` would need the stages that were dropped.
            uninitialized.fill_all(inner, runtime.device, peers, init_weights=False)
            place(runtime, inner, optimizers, move=move)
            for stage in stages:
                assign(inner, stage.module)
                self._parallelize(runtime, stage.module)
                assign(stage.module, inner)
        refuse_owners(optimizers, "a stage of this pipeline")
        sync = PipelineGradientSync(options, runtime, inner, stages, uninitialized, line, peers)
        path = ForwardPath(inner, sync.forward, _refuse_mark)
        made = make_prepared(runtime, module, optimizers, sync, path, refuse_copies(inner, IN_STAGES))
        return replace(
            made,
            clip_norm=partial(clip_norm, scaler=runtime.loss_scaler, across=line),
            state=PipelineState(whole, ShardedState(), line, rank=runtime.world.rank, keeps=peers.rank == 0),
        )

    def _parallelize(self, runtime: Runtime, module: nn.Module) -> nn.Module:
        if self.parallelize_fn is None:
            return module
        assert runtime.mesh is not None
        whole = frozen_wrapped(module)
        try:
            result = parallelize(module, runtime.mesh, self.parallelize_fn)
        except (NotImplementedError, AssertionError, RuntimeError) as error:
            if whole:
                raise ValueError(_WHOLE.format(model=type(module).__name__, names=name_some(list(whole)))) from error
            raise
        if self.reshard_roots:
            reshard_roots(module)
        return result

    def _written(self) -> dict[str, Degree]:
        return {"data": self.data, "shard": self.shard, "context": self.context, "tensor": self.tensor}


_WHOLE = (
    "`parallelize_fn` raised for a `{model}` with frozen parameters of other classes ({names}), such as quantised "
    "weights, which `fully_shard` cannot shard. Leave them whole on each rank: `fully_shard(model, mesh=mesh['shard'], "
    "ignored_params={{p for p in model.parameters() if not p.requires_grad}})`."
)


def place_and_broadcast(runtime: Runtime, module: nn.Module, optimizers: Sequence[Optimizer], *, move: bool) -> None:
    """Cast the module, move it to the device (`move`), and broadcast it from rank 0, except tensors on meta.

    Ranks: all call it, before the module is parallelised.
    """
    cast_module(runtime.precision, module)
    make_contiguous(module)
    tensors = _with_values(module)
    if move:
        for tensor in tensors:
            move_tensor(tensor, runtime.device)
        for optimizer in optimizers:
            move_state(optimizer, runtime.device)
    if runtime.world.size > 1:
        broadcast_from_rank_zero(runtime.collective, tensors)


def _with_values(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]


def _refuse_mark(method: str) -> None:
    raise ValueError(
        f"`mark_forward_method({method!r})` on a model in a pipeline: stages are connected only by `forward`. Compute "
        "the loss in `loss_fn`, and call the model."
    )
