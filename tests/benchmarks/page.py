"""`docs/measurements/bench.md`: what `make bench` measured last, a table for each part, with date and machine."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import rivals
import torch
from timing import Row, amount

PAGE = Path(os.environ.get("BENCH_PAGE", Path(__file__).parents[2] / "docs/measurements/bench.md"))


def write(measured: Mapping[str, Sequence[Row]]) -> None:
    """Replace the tables of the parts that were measured. Headings and prose stay; a new part gets a section."""
    text = PAGE.read_text()
    for part, rows in measured.items():
        begin, end = f"<!-- measured: make bench BENCH_ARGS={part} -->\n", "<!-- end -->\n"
        table = f"{begin}{_table(part, rows)}{end}"
        old = re.compile(f"{re.escape(begin)}.*?{end}", re.DOTALL)
        text = old.sub(lambda _, new=table: new, text) if old.search(text) else f"{text}\n## `{part}`\n\n{table}"  # type: ignore[misc]
    PAGE.write_text(text)


def _table(part: str, rows: Sequence[Row]) -> str:
    beside = [f"{package} {importlib.metadata.version(package)}" for package in rivals.RIVALS if _is_installed(package)]
    where = [
        f"{date.today():%d %B %Y}",
        f"`BENCH_ARGS={part}`",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
        f"{os.cpu_count()} cores",
        f"load {os.getloadavg()[0]:.1f}",
        *([f"at most {os.environ['BENCH_ROUNDS']} rounds"] if "BENCH_ROUNDS" in os.environ else []),
    ]
    others = ", ".join(beside) or "nothing, so that only plain PyTorch is compared"
    lines = [
        f"{', '.join(where)}. Installed beside: {others}.\n",
        "| measurement | variant | median | extra | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row.ratio:.3f} ± {row.spread:.3f}"
        cells = (row.measurement, row.variant, amount(row.median, row), amount(row.extra, row), ratio)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _is_installed(package: str) -> bool:
    return rivals.RIVALS[package] in rivals.installed()
