"""What `fabric.monitor` costs in a step of some milliseconds: the same loop with the monitor and without, in turns."""

from __future__ import annotations

from functools import partial

import rivals
import torch
from timing import Action, Row, race
from torch import nn

from fabric import Fabric

BATCH, WIDTH = 256, 256
STEPS = 50
"""Of one turn, which is one window of the monitor: its all-gather is part of the cost."""


def monitor() -> list[Row]:
    """In one process, and in two ranks of DDP."""
    found: list[Row] = []
    for size, strategy in ((1, "auto"), (2, "ddp")):
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=size, sanitize=False, launcher="forkserver")
        found += fabric.launch(monitored) or []
    return found


def monitored(ours: Fabric) -> list[Row]:
    """Runs on every rank; every rank measures, rank 0 reports."""
    rivals.quiet()
    torch.set_num_threads(1)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model, optimizer = ours.setup(net, torch.optim.SGD(net.parameters(), lr=1e-6))
    x = torch.ones(BATCH, WIDTH)
    seen = ours.monitor(window_steps=STEPS, show=False)
    moments = ours._connected.moments

    def steps(is_on: bool) -> None:
        moments._collect((seen,) if is_on else ())
        for path in seen._paths:
            path.on_call = seen._forward_begins if is_on else None
        for _ in range(STEPS):
            optimizer.zero_grad()
            ours.backward(model(x).square().mean())
            optimizer.step()

    variants: dict[str, Action] = {"without": partial(steps, False), "ours": partial(steps, True)}
    name = f"{STEPS} steps with fabric.monitor, {ours.world_size} rank{'s' * (ours.world_size > 1)}"
    found = race(name, variants, repeat=1, rounds=25, target="1.00")
    moments._collect((seen,))
    return found
