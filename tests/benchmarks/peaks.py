"""The most memory that a rank has, beside what the page on memory predicts: `make bench BENCH_ARGS=peaks`.

In multiples of the weights in float32. Each rank is a new fork of one server, with memory as in `sharded.py`, and the
first step of a tiny model is taken off.
"""

from __future__ import annotations

import resource

import torch
from sharded import PAGES_BYTES, _allocate, _quiet
from timing import Row
from torch import nn

from fabric import Fabric

DIM, NUM_BLOCKS, NUM_STEPS, NUM_RANKS = 1024, 5, 4, 2

PREDICTED = {
    "single_device": 4.0,
    "ddp": 5.0,
    "ddp, sanitize=False": 5.0,
    "ddp, bf16-mixed": 5.0,
    "ddp, bf16-true": 2.5,
    "fsdp": 4 / NUM_RANKS + 3 / NUM_BLOCKS,
    "fsdp, bf16-mixed": 4 / NUM_RANKS + 3 / NUM_BLOCKS,
    "deepspeed_stage_1": 2 + 4 / NUM_RANKS,
    "deepspeed_stage_2": 1 + 6 / NUM_RANKS,
    "deepspeed_stage_3": 1 + 7 / NUM_RANKS,
    "ddp_sharded": 1 + 3 / NUM_RANKS,
    "ddp_fully_sharded": 4 / NUM_RANKS + 3 / NUM_BLOCKS,
}
"""With AdamW, of a model whose activations are small; see `docs/how-to/memory.md`."""


class Block(nn.Module):
    """A residual block of 8.4M weights."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x).relu())  # type: ignore[no-any-return]


def peaks() -> list[Row]:
    """Predicted and measured peaks of two ranks, in MB."""
    found = []
    for name, multiple in PREDICTED.items():
        strategy, *words = name.split(", ")
        ranks = 1 if strategy == "single_device" else NUM_RANKS
        fabric = {"accelerator": "cpu", "strategy": strategy, "devices": ranks, "launcher": "forkserver"}
        fabric |= {"sanitize": False} if "sanitize=False" in words else {}
        fabric |= {"precision": words[0]} if words and "bf16" in words[0] else {}
        nothing, peak = (Fabric(**fabric).launch(_peak, *each) or 0.0 for each in ((4, 1), (DIM, NUM_BLOCKS)))
        weights = NUM_BLOCKS * (8 * DIM**2 + 5 * DIM) * 4 / 2**20
        predicted, measured = multiple * weights, peak - nothing
        for variant, value in (("predicted", predicted), ("measured", measured)):
            row = {"extra": value - predicted, "ratio": value / predicted, "spread": 0.0, "target": "", "unit": "MB"}
            found.append(Row(measurement=f"peak, {name}: {multiple:g} W", variant=variant, median=value, **row))
    return found


def _peak(fabric: Fabric, dim: int, num_blocks: int) -> float:
    _quiet()
    _allocate(PAGES_BYTES)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dim) for _ in range(num_blocks)))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(8, dim)
    for _ in range(NUM_STEPS):
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)  # Linux counts KB
    return float(fabric.all_reduce(peak, reduce_op="max"))
