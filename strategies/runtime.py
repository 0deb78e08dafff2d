"""The state of a process once it is connected (`Runtime`: world, device, collective and precision), and what each rank
holds of a model (`Layout`), which a strategy returns, and loaders and checks read.

`Strategy.connect` puts what holds for every model of the strategy into `Runtime.layout`. `Strategy.setup` puts what
holds for one model into `Prepared.layout`: the same, unless the user's function decided.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, final

import torch

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.loop_progress import LoopProgress
from fabric.strategies.data.partition import Share, Uneven
from fabric.strategies.data.rank_seeds import GeneratorDivergence
from fabric.strategies.data.transfer import Carry
from fabric.strategies.precision.loss_scaler import LossScaler
from fabric.strategies.precision.precision import Precision, dtype_of_new_tensors
from fabric.strategies.tensors.dtensor import local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What each rank holds of a model. The defaults are those of replicas whose gradients are averaged."""

    weights: Literal["replicas", "shards", "any"] = "replicas"
    """Every rank has all weights of the model ("replicas"), or some, as its `StateAccess` tells ("shards"). "any": the
    user's function decides, and each rank may have a model of its own."""
    gradients: Literal["replicas", "shards"] = "replicas"
    """Whether every rank has the averaged gradients of all weights before a step, or of some."""
    optimizer_states: Literal["replicas", "shards"] = "replicas"
    """Whether every rank has the optimizer's states of all weights, or of some, as its `StateAccess` tells."""
    forward_communicates: bool = False
    """Whether each forward waits for one on ranks that read other data, in evaluation too."""
    averages_before_hooks: bool = False
    """Whether the gradient that a post-accumulate hook of a parameter finds is averaged already."""


REPLICAS = Layout()
SHARDS = Layout(weights="shards", gradients="shards", optimizer_states="shards")
"""Every rank has a part of weights, gradients and optimizer states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Created by `Strategy.connect`, the first thing in a rank. Of its fields, `loss_scaler`, `loop_progress` and
    `divergence` change as the loop runs."""

    world: World
    device: torch.device
    """The device of this rank."""
    devices: tuple[torch.device, ...]
    """All devices of this process; `device` is the first. More than one only for `dp`."""
    collective: Collective
    precision: Precision
    loss_scaler: LossScaler | None
    """Present exactly when `precision.scales_loss`."""
    report: Callable[[str], None]
    """Logs a message to the user, through the logger `fabric`; silent on all ranks but zero."""
    any_rank: Callable[[bool], bool] = bool
    """Whether the argument is True on any rank: one small all-reduce. Where every rank has the averaged gradients of
    the whole model, what is found in them is the same on all, and nothing is sent."""
    new_tensors: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Context for forward and backward: new tensors have the precision's dtype. May be entered by any thread."""
    share: Share = field(default_factory=Share)
    """The part of the data that this rank reads. Ranks that hold parts of one model have the same one."""
    carry: Carry | None = None
    """How batches are moved to the device, if not by `Tensor.to`."""
    uneven: Uneven | None = None
    """What ranks do when the first has no batch left; None: see `Fabric.setup_dataloaders`."""
    layout: Layout = REPLICAS
    """How the models of the strategy lie over the ranks, as far as it knows before it has seen one."""
    mesh: "DeviceMesh | None" = None
    """The device mesh, if the strategy has one."""
    loop_progress: LoopProgress = field(default_factory=LoopProgress)
    """What the loop has done so far: batches, backwards and steps."""
    divergence: GeneratorDivergence = field(default_factory=GeneratorDivergence)

    def diverge_generators(self) -> None:
        """Make ranks that read different data draw different random numbers from here on: see `GeneratorDivergence`."""
        self.divergence.diverge(self.share)


def open_runtime(
    world: World,
    devices: Sequence[torch.device],
    collective: Collective,
    precision: Precision,
    *,
    layout: Layout = REPLICAS,
    carry: Carry | None = None,
) -> Runtime:
    """Connect to the other ranks, and create the runtime of this one; each rank reads a share of its own.

    Where gradients are in shards, all ranks decide together whether one overflowed.
    """
    collective.setup()
    in_shards = layout.gradients == "shards"
    report = logging.getLogger("fabric").warning if world.is_global_zero else lambda sentence: None
    any_rank = partial(collective.reduce_boolean_decision, require_all=False) if in_shards else bool
    scaler = None
    if precision.scales_loss:
        local = local_part if in_shards else None
        scaler = LossScaler(init_scale=precision.init_scale, report=report, decide=any_rank, local=local)
    return Runtime(
        world=world,
        device=devices[0],
        devices=tuple(devices),
        collective=collective,
        precision=precision,
        loss_scaler=scaler,
        report=report,
        any_rank=any_rank,
        layout=layout,
        new_tensors=dtype_of_new_tensors(precision),
        share=Share(index=world.rank, count=world.size),
        carry=carry,
    )
