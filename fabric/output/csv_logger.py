"""Metrics as rows of one CSV file, which is complete at any moment, even if the process is killed.

Each row is written with one write, so a reader never sees half a row. No file is kept open: the logger can be
pickled, forked and copied. A new metric needs a new column: the file is written again beside the old one, which it then
replaces. So rows are written once more each time that new names appear.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

from fabric.output.logger import make_run_directory


@final
class CSVLogger:
    """Writes `root/name/version_N/metrics.csv`: a column `step`, then one for each metric, in order of appearance.

    A row for each step, or for each call without a step or with a metric that the step has already. A cell is empty if
    there was no such metric, or no step. Numbers are read back exactly. `version=None` takes the next free number. No
    file or folder is created before the first row.
    """

    def __init__(self, root: str | os.PathLike[str], name: str = "", version: int | str | None = None) -> None:
        self.root, self.name, self.version = Path(root), name, version
        self._rows: CSVRows | None = None

    @property
    def file(self) -> Path | None:
        """The path of the file; None before the first row."""
        return None if self._rows is None else self._rows.file

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row, or add to the last one if it has the same step. Only one process may write a run.

        Cost: about 30 us on a local disk, opening and closing the file.
        Raises: ValueError: a metric is named `step`. FileExistsError: `version` was given, and exists.
        """
        self._open().append(metrics, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyperparameters to `hyperparameters.json` beside the rows; a second call replaces it."""
        write_hyperparams(self._open().file.parent, params)

    def _open(self) -> "CSVRows":
        if self._rows is None:
            self._rows = CSVRows(make_run_directory(self.root, self.name, self.version) / "metrics.csv")
        return self._rows


@final
class CSVRows:
    """The rows of one CSV file, created with the first row, in an existing directory."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.num_rows = 0
        self._columns = ["step"]
        self._last: dict[str, Any] = {}

    def append(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Write one row, and add columns for new metrics. If the last row is of this step and has none of them, they
        become part of it.

        Raises: ValueError: a metric is named `step`.
        """
        if "step" in metrics:
            raise ValueError("A metric is named 'step', which is the name of the first column. Give it another name.")
        added = [name for name in metrics if name not in self._columns]
        self._columns += added
        if self.num_rows == 0:
            self.file.write_bytes(_line(self._columns))
        elif added:
            self._widen(len(added))
        joins = step is not None and step == self._last.get("step") and not metrics.keys() & self._last.keys()
        replaced = self._row() if joins else b""
        self._last = {**(self._last if joins else {"step": "" if step is None else step}), **metrics}
        with self.file.open("r+b") as file:
            file.seek(-len(replaced), os.SEEK_END)
            file.write(self._row())  # not shorter than what it replaces
        self.num_rows += not joins

    def _row(self) -> bytes:
        return _line(self._last.get(column, "") for column in self._columns)

    def _widen(self, num_added: int) -> None:
        """Write the file again with the present columns; the new cells of old rows are empty."""
        beside = self.file.with_suffix(".csv.new")
        with self.file.open(newline="") as old, beside.open("w", newline="") as new:
            rows = csv.reader(old)
            next(rows)
            writer = csv.writer(new, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows([*row, *[""] * num_added] for row in rows)
            new.flush()
            os.fsync(new.fileno())
        beside.replace(self.file)


def write_hyperparams(directory: Path, params: Mapping[str, Any]) -> None:
    """Write `hyperparameters.json` atomically. Values without a JSON form are written as their `str`."""
    beside = directory / "hyperparameters.json.new"
    beside.write_text(json.dumps(dict(params), indent=2, default=str) + "\n", encoding="utf-8")
    beside.replace(directory / "hyperparameters.json")


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
