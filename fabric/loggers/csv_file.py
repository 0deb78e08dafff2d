"""Metrics as rows of one CSV file, which is whole at any moment, whatever kills the process.

Each call appends one row with one write, so a reader never meets half a row, and no file is held open: the logger may
be pickled, forked and copied. A metric not seen before needs a new column; then the file is written anew beside the
old one and takes its place. So the cost of a run is its rows, once for each time that new names appear.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from fabric.loggers.directory import make_run_directory


@final
class CSVLogger:
    """Writes `root/name/version_N/metrics.csv`: a column `step`, then one for each metric, in order of appearance.

    A row for each call; a cell is empty where the call had no such metric, or no step. Numbers read back as they were.
    `version=None` takes the next free number. Nothing is made before the first row.
    """

    def __init__(self, root: str | os.PathLike[str], name: str = "", version: int | str | None = None) -> None:
        self.root, self.name, self.version = Path(root), name, version
        self._file: Path | None = None
        self._columns = ["step"]

    @property
    def file(self) -> Path | None:
        """Where the rows are; None before the first."""
        return self._file

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row. Only one process writes a run.

        Cost: about 30 us on a local disk, opening and closing the file.
        Raises: ValueError: a metric is named `step`. TypeError: a value is no number. FileExistsError: see `version`.
        """
        _check(metrics)
        added = [name for name in metrics if name not in self._columns]
        if self._file is None:
            self._columns += added
            self._file = self._create()
        elif added:
            self._columns += added
            self._widen(self._file, len(added))
        cells = {"step": "" if step is None else step, **metrics}
        _append(self._file, _line(cells.get(column, "") for column in self._columns))

    def _create(self) -> Path:
        file = make_run_directory(self.root, self.name, self.version) / "metrics.csv"
        _append(file, _line(self._columns))
        return file

    def _widen(self, file: Path, num_added: int) -> None:
        """Write the file anew with the columns there are now; the new cells of old rows are empty."""
        beside = file.with_suffix(".csv.new")
        with file.open(newline="") as old, beside.open("w", newline="") as new:
            rows = csv.reader(old)
            next(rows)
            writer = csv.writer(new, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows([*row, *[""] * num_added] for row in rows)
            new.flush()
            os.fsync(new.fileno())
        beside.replace(file)


def _check(metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if name == "step":
            raise ValueError("A metric is named 'step', which is the name of the first column. Give it another name.")
        if not isinstance(value, int | float):
            raise TypeError(
                f"The metric {name!r} is {value!r}, a `{type(value).__name__}`. A CSV row holds numbers: "
                "write an int or a float, or give tensors of one element to `fabric.log`."
            )


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _append(file: Path, line: bytes) -> None:
    with file.open("ab", buffering=0) as raw:
        written = raw.write(line)
    if written != len(line):
        raise OSError(f"Only {written} of the {len(line)} bytes of a row could be written to {str(file)!r}: disk full?")
