"""What `fabric.monitor` costs: in a step of some milliseconds, and at the end of a window of steps.

The same loop with the monitor and without takes turns of a few steps, many times. What comes once per window is
measured apart, for by default a window has 5 s of steps.
"""

from __future__ import annotations

import time
from functools import partial

import rivals
import torch
from timing import Row, rows, take_turns
from torch import nn

from fabric import Fabric
from fabric.monitor.monitor import WINDOW_SECONDS

BATCH, WIDTH = 256, 256
STEPS = 5
"""Of one turn."""
TURNS = 80
"""In one window, with the monitor: 400 steps, about as many as 5 s have."""
WINDOWS = 5


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
    seen = ours.monitor(window_steps=10**9, show=False)
    moments = ours._connected.moments

    def steps(number: int, is_on: bool) -> None:
        moments._collect((seen,) if is_on else ())
        for path in seen._paths:
            path.on_call = seen._forward_begins if is_on else None
        for _ in range(number):
            optimizer.zero_grad()
            ours.backward(model(x).square().mean())
            optimizer.step()

    def two_steps() -> float:
        """Their seconds: in the second step the ranks receive what they have sent at the end of a window."""
        start = time.perf_counter()
        steps(2, is_on=True)
        return time.perf_counter() - start

    of_steps: dict[str, list[float]] = {"without": [], "ours": []}
    ends: list[float] = []
    for _ in range(WINDOWS):
        turns = take_turns({name: partial(steps, STEPS, name == "ours") for name in of_steps}, repeat=1, rounds=TURNS)
        for name, microseconds in turns.items():
            of_steps[name] += microseconds
        without = two_steps()
        seen._due = seen._window_end = seen._num_steps + 1
        ends.append(two_steps() - without)
    of_windows = {"without": [1e6 * WINDOW_SECONDS] * WINDOWS, "ours": [1e6 * (WINDOW_SECONDS + end) for end in ends]}
    ranks = f"{ours.world_size} rank{'s' * (ours.world_size > 1)}"
    return [
        *rows(f"{STEPS} steps with fabric.monitor, {ranks}", of_steps, "1.00"),
        *rows(f"the end of a window of {WINDOW_SECONDS:g} s, {ranks}", of_windows, "1.00"),
    ]
