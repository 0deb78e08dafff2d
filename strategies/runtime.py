"""What a process owns once it is connected: its place, its device, its collective and its precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

import torch

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.loader_check import LoaderNumbers
from fabric.strategies.data.share import Share
from fabric.strategies.data.transfer import Carry
from fabric.strategies.data.uneven import Uneven
from fabric.strategies.precision.forward_precision import dtype_of_new_tensors
from fabric.strategies.precision.loss_scaler import LossScaler, loss_scaler_for
from fabric.strategies.precision.precision import Precision
from fabric.strategies.random_streams import RandomStreams
from fabric.strategies.sharding.dtensor import local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
class Backward:
    """Whether `Fabric.backward` runs at present: a backend whose gradients need more than autograd asks."""

    is_running = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Made by `Strategy.connect`, first thing in a rank."""

    world: World
    device: torch.device
    """Where this rank's tensors live."""
    devices: tuple[torch.device, ...]
    """All that this process drives; `device` is the first. More than one only within `dp`."""
    collective: Collective
    precision: Precision
    loss_scaler: LossScaler | None
    """Present exactly when `precision.scales_loss`."""
    report: Callable[[str], None]
    """Tells the person who runs the job a sentence, by the standard logger `fabric`; silent on all ranks but zero."""
    new_tensors: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Within it, which is forward and backward, new tensors have the precision's dtype. Entered by any thread."""
    share: Share = field(default_factory=Share)
    """The part of the data that this rank reads. Ranks that hold parts of one model have the same one."""
    carry: Carry | None = None
    """How batches go to the device, where it has a way of its own."""
    uneven: Uneven | None = None
    """What ranks do when the first of them has no batch left; None: what `Fabric.setup_dataloaders` says of it."""
    mesh: DeviceMesh | None = None
    """The ranks along named axes, where the strategy has axes."""
    loader_numbers: LoaderNumbers = field(default_factory=LoaderNumbers)
    """Tells loaders apart that are set up in the same random state: they are shuffled differently."""
    random_streams: RandomStreams = field(default_factory=RandomStreams)
    backward: Backward = field(default_factory=Backward)

    def draw_apart(self) -> None:
        """Let ranks that read different data draw different random numbers from here on: see `RandomStreams`."""
        self.random_streams.differ(self.share)


def open_runtime(
    world: World,
    devices: Sequence[torch.device],
    collective: Collective,
    precision: Precision,
    *,
    in_shards: bool = False,
    carry: Carry | None = None,
) -> Runtime:
    """Connect to the other ranks, and return what this one owns from then on; each rank reads a share of its own.

    `in_shards`: ranks hold different gradients, so that all must decide together whether one overflowed.
    """
    collective.setup()
    report = logging.getLogger("fabric").warning if world.is_global_zero else _keep_quiet
    shared = (partial(_any_rank, collective), local_part) if in_shards else ()
    return Runtime(
        world=world,
        device=devices[0],
        devices=tuple(devices),
        collective=collective,
        precision=precision,
        loss_scaler=loss_scaler_for(precision, report, *shared),
        report=report,
        new_tensors=dtype_of_new_tensors(precision),
        share=Share(index=world.rank, count=world.size),
        carry=carry,
    )


def _any_rank(collective: Collective, decision: bool) -> bool:
    return collective.reduce_boolean_decision(decision, require_all=False)


def _keep_quiet(sentence: str) -> None:
    pass
