"""What a process owns once it is connected: its place, its device, its collective and its precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.precision.loss_scaler import LossScaler, loss_scaler_for
from fabric.strategies.precision.precision import Precision


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


def connect(world: World, devices: Sequence[torch.device], collective: Collective, precision: Precision) -> Runtime:
    """Meet the other ranks, and give what this one owns from then on."""
    collective.setup()
    report = logging.getLogger("fabric").warning if world.is_global_zero else _keep_quiet
    return Runtime(
        world=world,
        device=devices[0],
        devices=tuple(devices),
        collective=collective,
        precision=precision,
        loss_scaler=loss_scaler_for(precision, report),
        report=report,
    )


def _keep_quiet(sentence: str) -> None:
    pass
