"""What `activation_offload` keeps off the device, and what a step with it takes: `make bench BENCH_ARGS=offload`.

Over the device that `make device` pretends, whose memory is counted exactly; its copies and its computation share the
processor, so the time is that of a device that overlaps nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from timing import Row, limited, rows

PYTHON = str(Path(__file__).parents[2] / ".venv/device/bin/python")
PROGRAM = """
import json, sys, time
import torch
from torch import nn
from fabric import Fabric
from fabric.strategies import SingleDeviceStrategy

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return x + self.narrow(self.wide(x).relu())

options = {
    "plain": {},
    "offloaded": {"activation_offload": "blocks"},
    "recomputed": {"activation_checkpointing_policy": "blocks"},
    "recomputed, inputs offloaded": {"activation_checkpointing_policy": "blocks", "activation_offload": "blocks"},
}
steps, held = {}, {}
for name, words in options.items():
    fabric = Fabric(accelerator="cuda", strategy=SingleDeviceStrategy(**words), devices=1)
    model = fabric.setup_module(nn.Sequential(*(Block() for _ in range(8))))
    x = torch.randn(4096, 64, device="cuda")
    def step(fabric=fabric, model=model, x=x):
        before = torch.cuda.memory_allocated()
        loss = model(x).square().mean()
        kept = torch.cuda.memory_allocated() - before
        fabric.backward(loss)
        torch.cuda.synchronize()
        return kept
    step()
    steps[name], held[name] = step, step() / 2**20
times = {name: [] for name in steps}
for _ in range(int(sys.argv[1])):
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        times[name].append((time.perf_counter() - start) * 1e6)
print(json.dumps([{name: [kept, kept] for name, kept in held.items()}, times]))
"""


def offload(num_rounds: int = 9) -> list[Row]:
    """Bytes that a forward of eight blocks leaves on the device, and a step; none where `make device` was not run."""
    if not Path(PYTHON).exists():
        return []
    command = [PYTHON, "-c", PROGRAM, str(limited(num_rounds))]
    found = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PRETENDED_DEVICES": "1"}
    )
    held, times = json.loads(found.stdout.splitlines()[-1])
    kept = rows("kept on the device by a forward of 8 blocks", held, "0.1 x", unit="MB")
    return kept + rows("forward and backward of 8 blocks", times, "")
