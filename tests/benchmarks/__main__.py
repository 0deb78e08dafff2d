"""`make bench`: one table of ratios against raw PyTorch and, where installed, against what people use today.

It writes docs/measurements/bench.md. `BENCH_ARGS='sharded memory'` chooses parts of it, and BENCH_ROUNDS in the
environment limits the rounds:
imports, programs, launches, start, many_ranks, process, ranks, numbers, monitor, sharded, memory, peaks, offload,
checkpoints, verify.
"""

from __future__ import annotations

import platform
import sys

import page
import rivals
import torch
from checkpoints import checkpoints
from in_process import one_process, one_rank, two_ranks
from monitor_cost import monitor
from numbers_cost import numbers
from offload import offload
from peaks import peaks
from rich.console import Console
from rich.table import Table
from sharded import memory, steps
from timing import Row, amount
from whole_process import imports, launches, many_ranks, programs, start, verify

from fabric import Fabric


def ranks() -> list[Row]:
    """A tiny step on one DDP rank; a tiny step and the collectives on two."""
    alone = Fabric(accelerator="cpu", strategy="ddp", devices=1, launcher="forkserver").launch(one_rank) or []
    return alone + (Fabric(accelerator="cpu", strategy="ddp", devices=2, launcher="forkserver").launch(two_ranks) or [])


def exact_numbers() -> list[Row]:
    """What weights, agreement, positions and the guard cost in a step, on two ranks."""
    return Fabric(accelerator="cpu", strategy="ddp", devices=2, launcher="forkserver").launch(numbers) or []


PARTS = {
    "imports": imports,
    "programs": programs,
    "launches": launches,
    "start": start,
    "many_ranks": many_ranks,
    "process": one_process,
    "ranks": ranks,
    "numbers": exact_numbers,
    "monitor": monitor,
    "sharded": steps,
    "memory": memory,
    "peaks": peaks,
    "offload": offload,
    "checkpoints": checkpoints,
    "verify": verify,
}


def main(words: list[str]) -> None:
    """Measure what is asked for, or everything, within twenty minutes, and print it."""
    unknown = set(words) - set(PARTS)
    if unknown:
        raise SystemExit(f"{sorted(unknown)[0]!r} is no part of the benchmarks. There are {', '.join(PARTS)}.")
    measured = {name: part() for name, part in PARTS.items() if name in (words or PARTS)}
    page.write(measured)
    lines = [row for rows in measured.values() for row in rows]
    console = Console(width=130)
    here = f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads"
    console.print(f"{here}; held against: {', '.join(rivals.installed()) or 'nothing else is installed'}")
    console.print(_table(lines))


def _table(lines: list[Row]) -> Table:
    table = Table(
        title="Medians of rounds in which variants take turns; difference and ratio (half lie within +-) to the first"
    )
    for heading in ("measurement", "variant", "median", "extra", "ratio", "target"):
        table.add_column(heading, justify="left" if heading in ("measurement", "variant", "target") else "right")
    last = ""
    for row in lines:
        if row.measurement != last:
            table.add_section()
        name = row.measurement if row.measurement != last else ""
        ratio = f"{row.ratio:.3f} +- {row.spread:.3f}"
        table.add_row(name, row.variant, amount(row.median, row), amount(row.extra, row), ratio, row.target)
        last = row.measurement
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
