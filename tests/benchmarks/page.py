"""`docs/measurements/bench.md`: what `make bench` measured last, a section for each part, with date and machine."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch
from timing import Row, amount

PAGE = Path(__file__).parents[2] / "docs/measurements/bench.md"


def write(measured: Mapping[str, Sequence[Row]], rivals: Sequence[str]) -> None:
    """Replace the sections of the parts that were measured; the others stay."""
    text = PAGE.read_text()
    for part, rows in measured.items():
        begin, end = f"<!-- measured: make bench BENCH_ARGS={part} -->\n", "<!-- end -->\n"
        section = f"## `BENCH_ARGS={part}`\n\n{begin}{_table(rows, rivals)}{end}"
        old = re.compile(rf"## `BENCH_ARGS={part}`\n\n{re.escape(begin)}.*?{end}", re.DOTALL)
        text = old.sub(lambda _, new=section: new, text) if old.search(text) else f"{text.rstrip()}\n\n{section}"  # type: ignore[misc]
    PAGE.write_text(text)


def _table(rows: Sequence[Row], rivals: Sequence[str]) -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    where = f"{date.today():%d %B %Y}, {versions}"
    beside = f"held against {', '.join(rivals)}" if rivals else "held against raw PyTorch only"
    busy = f"load of the machine {os.getloadavg()[0]:.1f}"
    lines = [
        f"{where}; {beside}; {busy}.\n",
        "| measurement | variant | median | extra | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row.ratio:.3f} ± {row.spread:.3f}"
        cells = (row.measurement, row.variant, amount(row.median, row), amount(row.extra, row), ratio)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"
