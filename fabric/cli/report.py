"""`fabric report`: the page of a run, or of two runs side by side, as one file."""

import argparse
import sys
from pathlib import Path

from fabric.report.page import page
from fabric.report.run import read


def report(parsed: argparse.Namespace) -> int:
    """Write the page, and print its path; what is missing or damaged goes to stderr. Returns the exit code.

    Raises: ValueError: a folder is not that of a run.
    """
    if len(parsed.runs) > 2:
        raise ValueError(f"{len(parsed.runs)} folders were named. Write one run, or two, which stand side by side.")
    runs = [read(Path(folder)) for folder in parsed.runs]
    try:
        html = page(runs)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    out = Path(parsed.out) if parsed.out is not None else runs[0].folder / "report.html"
    out.write_text(html, encoding="utf-8")
    for run in runs:
        for note in run.notes:
            print(f"{run.folder}: {note}", file=sys.stderr)
    print(out)
    return 0
