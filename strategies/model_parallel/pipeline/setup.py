"""Setting up a model in a pipeline: it is cut, each rank keeps its stages, and the user's function lays those out.

What `ModelParallelStrategy.setup` does where it has a `pipeline`. The order matters: weights become those of rank 0
while every rank still has the whole model, and only what a rank keeps is moved to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.gradients.averaging import Averaging
from fabric.strategies.gradients.clipping import clip_norm, clip_value
from fabric.strategies.model_parallel.pipeline.options import Pipeline
from fabric.strategies.model_parallel.pipeline.schedule import Stages
from fabric.strategies.model_parallel.pipeline.split import cut, drop_others, give_back, take_over
from fabric.strategies.model_parallel.pipeline.state import PipelineState, WholeModel
from fabric.strategies.module.buffers import follow_rank_zero
from fabric.strategies.module.changes import Additions
from fabric.strategies.module.copies import IN_STAGES, refuse_copies
from fabric.strategies.module.deferred_init import Unfilled, in_order_of_apply
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.module.parameter_rebinding import follow
from fabric.strategies.module.prepare import attach_scaler, backward_through, place
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.dtensor import ShardedState
from fabric.strategies.sharding.layout import fsdp_modules
from fabric.strategies.sharding.mesh import along


def pipelined(
    options: Pipeline,
    runtime: Runtime,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    move: bool,
    parallelize: Callable[[nn.Module], Any],
) -> Prepared:
    """Prepare a model whose stages lie on the ranks along the axis "pipeline".

    `parallelize`: the user's function, for one stage. Ranks: all of the mesh.
    """
    assert runtime.mesh is not None
    mesh, inner = runtime.mesh, uncompiled(module)
    line = along(runtime.collective, mesh, ("pipeline",))
    assert mesh.mesh_dim_names is not None
    peers = along(runtime.collective, mesh, [axis for axis in mesh.mesh_dim_names if axis != "pipeline"])
    whole = WholeModel(inner, optimizers)
    unfilled = Unfilled(inner)
    all_stages = cut(inner, options)
    stages = [all_stages[index] for index in options.stages_of(line.rank)]
    tensors = [tensor for tensor in (*inner.parameters(), *inner.buffers()) if not tensor.is_meta]
    if runtime.world.size > 1:
        follow_rank_zero(runtime.collective, tensors)
    drop_others(inner, stages)
    whole.leave()
    with follow(inner, optimizers):
        was_empty = any(parameter.is_meta for parameter in inner.parameters())
        for part in in_order_of_apply(inner):
            unfilled.fill(part, runtime.device, peers)
        unfilled.finish(None, runtime.device, peers)  # an `init_weights` would look for what was dropped
        if was_empty and peers.size > 1:
            follow_rank_zero(peers, (*inner.parameters(), *inner.buffers()))
        place(runtime, inner, optimizers, move=move)
        take_over(stages, inner)
        for stage in stages:
            parallelize(stage.module)
        give_back(stages, inner)
    averaging = Averaging(runtime, nn.ModuleDict({f"stage {stage.index}": stage.module for stage in stages}))
    averaging.sharded.clear()  # a schedule lets `fully_shard` reduce what it computed, within no_backward_sync, too
    model = Stages(options, runtime, stages, line, mesh.get_group("pipeline"))

    additions = Additions(inner, by_name=bool(fsdp_modules(inner)))

    def forward(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unfilled.check(peers)  # not all ranks: those of other stages may have nothing to fill
        additions.refuse()
        runtime.draw_apart()
        with averaging.unsynced():  # backwards within it are not the user's
            return model.forward(function, args, kwargs)

    path = ForwardPath(inner, forward, _refuse_mark)
    detach = attach_scaler(runtime.loss_scaler, optimizers)
    copyable = refuse_copies(inner, IN_STAGES)

    def release() -> None:
        path.release()
        copyable()
        model.release()
        detach()
        averaging.end()

    return Prepared(
        module=module,
        optimizers=tuple(optimizers),
        backward=backward_through(runtime.loss_scaler, (averaging.watch,)),
        joins_backward=True,
        watches=(averaging.watch,),
        unsynced=averaging.unsynced,
        clip_norm=partial(clip_norm, scaler=runtime.loss_scaler, across=line),
        clip_value=partial(clip_value, scaler=runtime.loss_scaler),
        release=release,
        state=PipelineState(whole, ShardedState(peers.rank), line, keeps=peers.rank == 0),
    )


def _refuse_mark(method: str) -> None:
    raise ValueError(
        f"`mark_forward_method({method!r})` on a model in a pipeline: stages are connected by `forward` alone. Compute "
        "the loss in `loss_fn`, and call the model."
    )
