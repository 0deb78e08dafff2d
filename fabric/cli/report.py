"""`fabric report`: the page of a run, or of two runs side by side, as one file."""

import argparse
import sys
from pathlib import Path

from fabric.report.page import page
from fabric.report.run import read


def report(parsed: argparse.Namespace) -> int:
    """Write the page, and print its path; what is missing or damaged goes to stderr. Returns the exit code.

    Raises: ValueError: a folder is not that of a run, or matplotlib is not installed.
    """
    runs = [read(Path(folder)) for folder in (parsed.run, parsed.other) if folder is not None]
    out = Path(parsed.out or runs[0].folder / "report.html")
    out.write_text(page(runs), encoding="utf-8")
    for run in runs:
        for note in run.notes:
            print(f"{run.folder}: {note}", file=sys.stderr)
    print(out)
    return 0
