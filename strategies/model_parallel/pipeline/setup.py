"""`ModelParallelStrategy.setup` with a `pipeline`: split the model, keep this rank's stages, and parallelise them.

The order matters: weights are broadcast from rank 0 while every rank still has the whole model, and only the stages of
this rank are moved to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import uncompiled
from fabric.strategies.collectives.rank_zero import broadcast_from_rank_zero
from fabric.strategies.gradients.clipping import clip_norm
from fabric.strategies.model_parallel.pipeline.options import Pipeline
from fabric.strategies.model_parallel.pipeline.schedule import PipelineGradientSync
from fabric.strategies.model_parallel.pipeline.split import assign, drop_other_stages, split_model
from fabric.strategies.model_parallel.pipeline.state import PipelineState, WholeModel
from fabric.strategies.module.deepcopy import IN_STAGES, refuse_copies
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.module.initialization import UninitializedTensors
from fabric.strategies.optimizers.owners import refuse_owners
from fabric.strategies.optimizers.rebinding import rebinding
from fabric.strategies.prepare import place, prepared
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.mesh import along
from fabric.strategies.sharding.sharded_state import ShardedState


def pipelined(
    options: Pipeline,
    runtime: Runtime,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    move: bool,
    parallelize: Callable[[nn.Module], Any],
) -> Prepared:
    """Prepare a model whose stages are on the ranks along the axis "pipeline".

    `parallelize`: the user's function, called with each stage. Ranks: all of the mesh call it.
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
    tensors = [tensor for tensor in (*inner.parameters(), *inner.buffers()) if not tensor.is_meta]
    if runtime.world.size > 1:
        broadcast_from_rank_zero(runtime.collective, tensors)
    drop_other_stages(inner, stages)
    whole.leave(optimizers)
    with rebinding(inner, optimizers):
        # `init_weights` would need the stages that were dropped.
        uninitialized.fill_all(inner, runtime.device, peers, init_weights=False)
        place(runtime, inner, optimizers, move=move)
        for stage in stages:
            assign(inner, stage.module)
            parallelize(stage.module)
            assign(stage.module, inner)
    refuse_owners(optimizers, "a stage of this pipeline")
    sync = PipelineGradientSync(options, runtime, inner, stages, uninitialized, line, peers)
    path = ForwardPath(inner, sync.forward, _refuse_mark)
    made = prepared(runtime, module, optimizers, sync, path, refuse_copies(inner, IN_STAGES))
    return replace(
        made,
        clip_norm=partial(clip_norm, scaler=runtime.loss_scaler, across=line),
        state=PipelineState(whole, ShardedState(peers.rank), line, rank=runtime.world.rank, keeps=peers.rank == 0),
    )


def _refuse_mark(method: str) -> None:
    raise ValueError(
        f"`mark_forward_method({method!r})` on a model in a pipeline: stages are connected only by `forward`. Compute "
        "the loss in `loss_fn`, and call the model."
    )
