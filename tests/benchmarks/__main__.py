"""`make bench`: one table of ratios against raw PyTorch and, where installed, against what people use today."""

from __future__ import annotations

import platform

import rivals
import torch
from in_process import one_process, two_ranks
from rich.console import Console
from rich.table import Table
from timing import Row
from whole_process import imports, launches

from fabric import Fabric


def main() -> None:
    """Measure everything, within a few minutes, and print it."""
    ranks = Fabric(accelerator="cpu", strategy="ddp", devices=2, launcher="forkserver")
    lines = [*imports(), *launches(), *one_process(), *(ranks.launch(two_ranks) or [])]
    console = Console(width=130)
    here = f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads"
    console.print(f"{here}; held against: {', '.join(rivals.installed()) or 'nothing else is installed'}")
    console.print(_table(lines))


def _table(lines: list[Row]) -> Table:
    table = Table(title="Median of rounds in which the variants take turns; ratio and difference to the first")
    for heading in ("measurement", "variant", "median", "extra", "ratio", "target"):
        table.add_column(heading, justify="left" if heading in ("measurement", "variant", "target") else "right")
    last = ""
    for row in lines:
        if row.measurement != last:
            table.add_section()
        name = row.measurement if row.measurement != last else ""
        table.add_row(name, row.variant, _time(row.median_us), _time(row.extra_us), f"{row.ratio:.3f}", row.target)
        last = row.measurement
    return table


def _time(microseconds: float) -> str:
    if abs(microseconds) < 1e3:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.2f} ms" if abs(microseconds) < 1e6 else f"{microseconds / 1e6:.2f} s"


if __name__ == "__main__":
    main()
