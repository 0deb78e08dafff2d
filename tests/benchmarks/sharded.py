"""What a sharded step costs over its backend used directly: time with both in the same ranks, memory in ranks apart."""

from __future__ import annotations

import logging
import resource
import warnings

import torch
from backends import PAIRS, Size, ours
from timing import Row, race, rows

from fabric import Fabric

TARGET = "1.02 x"
NUM_STEPS = 10


def steps(num_rounds: int = 60) -> list[Row]:
    """A step of each strategy, 2 ranks; variants take turns."""
    found = []
    for name, (strategy, _) in PAIRS.items():
        ranks = Fabric(accelerator="cpu", strategy=strategy, devices=2, launcher="forkserver")
        found += ranks.launch(_race, name, num_rounds) or []
    return found


def memory(num_rounds: int = 2) -> list[Row]:
    """The most memory that a rank ever had above one that made a tiny step. Each rank is a new fork of one server."""
    found = []
    for name, (strategy, _) in PAIRS.items():
        peaks: dict[str, list[float]] = {"nothing": [], "raw": [], "ours": []}
        for _ in range(num_rounds):
            for variant, mine in peaks.items():
                ranks = Fabric(accelerator="cpu", strategy=strategy, devices=2, launcher="forkserver")
                mine.append(ranks.launch(_peak, name, variant) or 0.0)
        nothing = min(peaks.pop("nothing"))
        above = {variant: [peak - nothing for peak in mine] for variant, mine in peaks.items()}
        found += rows(f"peak memory, {name}, 2 ranks", above, TARGET, unit="MB")
    return found


def _race(fabric: Fabric, name: str, num_rounds: int) -> list[Row]:
    _quiet()
    size = Size()
    variants = {"raw": PAIRS[name][1](fabric, size), "ours": ours(fabric, size)}
    return race(f"step, {name}, 2 ranks", variants, repeat=1, rounds=num_rounds, target=TARGET)


def _peak(fabric: Fabric, name: str, variant: str) -> float:
    """Of the rank that had the most, in MB."""
    _quiet()
    size = Size(dim=512)
    if variant == "nothing":
        PAIRS[name][1](fabric, Size(dim=4, num_blocks=1))()  # what is imported, and the first message
    else:
        step = (ours if variant == "ours" else PAIRS[name][1])(fabric, size)
        for _ in range(NUM_STEPS):
            step()
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)  # Linux counts KB
    return float(fabric.all_reduce(peak, reduce_op="max"))


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
