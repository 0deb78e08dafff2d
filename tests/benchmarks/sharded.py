"""What a sharded step costs over its backend used directly: time with both in the same ranks, memory in ranks apart.

Note [Where tensors lie]
glibc's allocator takes a large tensor from the heap, or gives it pages of its own, by what was freed before. Messages
between such pages run at another speed, and a heap grows by its holes: FairScale's OSS against itself, made twice in
one process, differed by up to 11 % in time, and its peak by 5 %. So all tensors of a race come from the heap, several
launches lay them differently, and where memory is measured all are pages of their own.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import warnings
from collections.abc import Callable

import torch
from backends import FLOORS, PAIRS, Size, Step, ours
from timing import Row, in_order, limited, rows, take_turns

from fabric import Fabric

TARGET = "1.02 x"
NUM_STEPS = 4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HEAP_BYTES, PAGES_BYTES = 2**25, 2**16
"""From how many bytes on memory is pages of its own: glibc's largest number, and a small one."""


def steps(num_launches: int = 6, num_rounds: int = 12) -> list[Row]:
    """A step of each strategy, 2 ranks; variants take turns.

    Without the sanitizer: it watches step 1 to 4, 8, 16 and so on, a third of so few. `numbers` measures it.
    """
    found = []
    for name, (strategy, _) in PAIRS.items():
        times: dict[str, list[float]] = {variant: [] for variant in _makers(name)}
        for turn in range(limited(num_launches)):
            ranks = Fabric(accelerator="cpu", strategy=strategy, devices=2, launcher="forkserver", sanitize=False)
            for variant, mine in (ranks.launch(_race, name, turn, num_rounds) or {}).items():
                times[variant] += mine
        found += rows(f"step, {name}, 2 ranks", times, TARGET)
    return found


def memory(num_rounds: int = 3) -> list[Row]:
    """The most memory that a rank ever had above one that made a tiny step. Each rank is a new fork of one server."""
    found = []
    for name, (strategy, _) in PAIRS.items():
        peaks: dict[str, list[float]] = {"nothing": [], "raw": [], "ours": []}
        for _ in range(limited(num_rounds)):
            for variant, mine in peaks.items():
                ranks = Fabric(accelerator="cpu", strategy=strategy, devices=2, launcher="forkserver")
                mine.append(ranks.launch(_peak, name, variant) or 0.0)
        nothing = min(peaks.pop("nothing"))
        above = {variant: [peak - nothing for peak in mine] for variant, mine in peaks.items()}
        found += rows(f"peak memory, {name}, 2 ranks", above, TARGET, unit="MB")
    return found


def _makers(name: str) -> dict[str, Callable[[Fabric, Size], Step]]:
    floor = {"raw, root resharded": FLOORS[name]} if name in FLOORS else {}
    return {"raw": PAIRS[name][1], "ours": ours, **floor}


def _race(fabric: Fabric, name: str, turn: int, num_rounds: int) -> dict[str, list[float]]:
    _quiet()
    _allocate(HEAP_BYTES)
    makers = _makers(name)
    steps = {variant: make(fabric, Size()) for variant, make in in_order(makers, turn)}
    return take_turns({variant: steps[variant] for variant in makers}, repeat=1, rounds=num_rounds)


def _peak(fabric: Fabric, name: str, variant: str) -> float:
    """Of the rank that had the most, in MB."""
    _quiet()
    _allocate(PAGES_BYTES)
    size = Size(dim=4, num_blocks=1) if variant == "nothing" else Size(dim=512)  # what is imported, and first messages
    step = (ours if variant == "ours" else PAIRS[name][1])(fabric, size)
    for _ in range(NUM_STEPS):
        step()
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)  # Linux counts KB
    return float(fabric.all_reduce(peak, reduce_op="max"))


def _allocate(num_bytes: int) -> None:
    """Give memory of at least so many bytes pages of its own; the rest is the heap's, and stays with it."""
    c = ctypes.CDLL(None)
    if not (c.mallopt(M_MMAP_THRESHOLD, num_bytes) and c.mallopt(M_TRIM_THRESHOLD, 2**30)):
        raise RuntimeError("`mallopt` refused: these measurements are for glibc.")


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
