"""What is in the folder of a run, as far as it can be read: lines that cannot be read are named, and the rest is kept.

It reads `monitor.jsonl` (`fabric.monitor`), `run.json` (settings and doctor), `metrics.csv`
(`CSVLogger`), `failures.log` (the launcher, with `log_dir`), summaries of traces, and checkpoints. One is enough.
"""

import csv
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from fabric.checkpoints.directory import Name
from fabric.configure.description import NAME as DESCRIPTION
from fabric.strategies.checkpoint.manifest import NAME as MANIFEST

Line: TypeAlias = Mapping[str, Any]
MONITOR, METRICS, FAILURES = "monitor.jsonl", "metrics.csv", "failures.log"
DEPTH = 3
"""How many folders deep checkpoints and metrics of loggers are looked for."""
_FAILURE = re.compile(r"^# (\d+-\d+-\d+ \d+:\d+:\d+): ", re.MULTILINE)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that is known of one run."""

    folder: Path
    lines: tuple[Line, ...]
    """Of the monitor."""
    series: Mapping[str, list[tuple[float, float]]]
    """Steps and values of each metric, under the names that loggers get. A NaN stands before each new start."""
    settings: tuple[Line, ...]
    doctor: Line
    failures: tuple[tuple[float, str], ...]
    """Times and messages."""
    traces: tuple[Line, ...]
    checkpoints: tuple[Line, ...]
    notes: list[str]
    """What is missing or damaged, a sentence each."""

    def of(self, *kinds: str) -> list[Line]:
        """The lines of these kinds."""
        return [line for line in self.lines if line["kind"] in kinds]

    @property
    def restarts(self) -> list[float]:
        """The last step before each new start."""
        return [step for step, seconds in self.series.get("monitor/step_seconds", ()) if math.isnan(seconds)]

    @property
    def name(self) -> str:
        """The names of the folder and of the one above."""
        path = self.folder.resolve()
        return f"{path.parent.name}/{path.name}"


def read(folder: Path) -> Run:
    """Read all that is there. Raises: ValueError: it is no folder, or not that of a run of fabric."""
    if not folder.is_dir():
        raise ValueError(
            f"`{folder}` is not a folder. Write that of a run: `fabric.monitor(folder=...)`, or `log_dir`."
        )
    notes: list[str] = []
    described = _json(folder / DESCRIPTION, notes)
    lines = tuple(_monitored(folder / MONITOR, notes))
    run = Run(
        folder=folder,
        lines=lines,
        series={**_series(_logged(folder, notes), ""), **_series(lines, "monitor/")},
        settings=tuple(described.get("settings", ())),
        doctor=described.get("doctor", {}),
        failures=tuple(_failures(folder / FAILURES)),
        traces=tuple(filter(None, (_json(file, notes) for file in sorted(folder.glob("trace-*.summary.json"))))),
        checkpoints=tuple(_checkpoints(folder, lines)),
        notes=notes,
    )
    if not (run.lines or run.series or run.settings or run.failures or run.traces or run.checkpoints or notes):
        raise ValueError(
            f"`{folder}` is not the folder of a run of fabric: it has neither {MONITOR} nor {DESCRIPTION}, {METRICS}, "
            f"{FAILURES}, traces or checkpoints. `fabric.monitor(folder={str(folder)!r})` writes the first two."
        )
    if not run.lines:
        notes.append(f"No {MONITOR}: the run had no `fabric.monitor(...)`: times, memory and ranks are not known.")
    elif not run.of("window"):
        notes.append("No steps: the run ended before its first window of steps.")
    if unknown := [window["unknown"] for window in run.of("window") if window.get("unknown")]:
        notes.append(f"{len(unknown)} of {len(run.of('window'))} windows: {unknown[-1]}")
    return run


def _monitored(file: Path, notes: list[str]) -> Iterator[Line]:
    if not file.exists():
        return
    rows = file.read_bytes().split(b"\n")
    for number, row in enumerate(rows, 1):
        try:
            line = json.loads(row) if row.strip() else None
        except ValueError:
            how = "is cut off" if number == len(rows) else "cannot be read"
            notes.append(f"Line {number} of {MONITOR} {how}, as by a kill while it was written; the others are shown.")
            continue
        if isinstance(line, dict) and "kind" in line:
            yield line
        elif line is not None:
            raise ValueError(f"`{file}` was not written by `fabric.monitor`: its line {number} has no `kind`.")


def _series(lines: Iterable[Line], before: str) -> dict[str, list[tuple[float, float]]]:
    """The series of each metric, with `before` before its name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.get("metrics", {}).items():
            found.setdefault(before + name, []).append((line["step"], value))
        if line["kind"] == "start":
            for points in found.values():
                points.append((points[-1][0], math.nan))
    return found


def _logged(folder: Path, notes: list[str]) -> Iterator[Line]:
    """The rows of each `metrics.csv`, oldest file first: a run that was restarted has one for each start."""
    shown: list[str] = []
    for file in sorted(_within(folder, METRICS), key=lambda file: file.stat().st_mtime):
        header, *rows = list(csv.reader(file.read_text(encoding="utf-8").splitlines())) or [[]]
        if header[:1] != ["step"]:
            notes.append(f"`{file}` is not shown: its first column is not `step`, so `CSVLogger` has not written it.")
            continue
        shown.append(str(file.relative_to(folder)))
        yield {"kind": "start"}
        for count, row in enumerate(rows):
            try:
                numbers = {name: float(cell) for name, cell in zip(header, row, strict=True) if cell}
            except ValueError:
                notes.append(f"Line {count + 2} of {shown[-1]} cannot be read; the others are shown.")
                continue
            yield {"kind": "row", "step": numbers.pop("step", count), "metrics": numbers}
    if len(shown) > 1:
        notes.append(f"Metrics of {len(shown)} files are shown as one run, in this order: {', '.join(shown)}.")


def _failures(file: Path) -> Iterator[tuple[float, str]]:
    if file.exists():
        _, *parts = _FAILURE.split(file.read_text(encoding="utf-8", errors="replace"))
        for date, message in zip(parts[::2], parts[1::2], strict=True):
            yield time.mktime(time.strptime(date, "%Y-%m-%d %H:%M:%S")), message.strip()


def _checkpoints(folder: Path, lines: Sequence[Line]) -> Iterator[Line]:
    """Complete checkpoints, oldest first. Steps are in their names, or what the monitor has seen."""
    saved = {Path(line["path"]).name: line["step"] for line in lines if line["kind"] == "save"}
    for file in sorted(_within(folder, MANIFEST), key=lambda file: file.stat().st_mtime):
        if b"torchfabric checkpoint" not in file.read_bytes():  # of another program
            continue
        name = Name.parse(file.parent.name)
        bytes_ = sum(part.stat().st_size for part in file.parent.iterdir())
        step, metric = (name.step, name.metric) if name is not None else (saved.get(file.parent.name), None)
        path = str(file.parent.relative_to(folder))
        yield {"path": path, "step": step, "metric": metric, "bytes": bytes_, "time": file.stat().st_mtime}


def _within(folder: Path, name: str) -> Iterator[Path]:
    for depth in range(DEPTH + 1):
        yield from folder.glob("*/" * depth + name)


def _json(file: Path, notes: list[str]) -> Line:
    """The object in a file; an empty one without the file, or if it cannot be read."""
    try:
        return {**json.loads(file.read_text(encoding="utf-8"))} if file.exists() else {}
    except (TypeError, ValueError):
        notes.append(f"{file.name} cannot be read; the rest is shown.")
        return {}
