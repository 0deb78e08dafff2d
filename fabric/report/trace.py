"""`fabric.trace(steps=...)`: torch's profiler on every rank for some steps, and one file of all ranks for Perfetto.

After the last of these steps each rank sends its events to rank 0 in turn, which gives every process of every rank a
row and puts all on one clock. Ranks of one host share its clock. Another host's is read after some small all-reduces,
which end on all ranks at about the same time, and the median difference to that of rank 0 is taken out.

Where kernels run on a device, collectives are kernels of NCCL and its kind, and computation is all other kernels.
Elsewhere collectives are what gloo's threads do, and computation is torch's operators.
"""

import gzip
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, final

from torch.optim import Optimizer
from torch.profiler import profile

from fabric.checks.check import Check
from fabric.session import Session

Event: TypeAlias = dict[str, Any]
Interval: TypeAlias = tuple[float, float]
NUM_READINGS = 5
"""How often the clocks are read together. Not measured."""
ROWS_OF_A_RANK = 1000
"""The rows of rank r have the numbers from this times r on."""


@final
class Trace(Check):
    """Traces `steps` of the optimizer that steps most, counted from 1. Ranks: all, with the same steps."""

    def __init__(self, steps: range, folder: Path, session: Session) -> None:
        self._steps, self._folder, self._session = steps, folder, session
        self._profiler: profile | None = None
        if not isinstance(steps, range) or steps.step != 1 or not 1 <= steps.start < steps.stop:
            raise ValueError(f"`fabric.trace(steps={steps!r})`: name steps as `range(10, 12)` does, from 1 on.")
        if steps.start <= self._done:
            raise ValueError(f"`fabric.trace(steps={steps!r})`: {self._done} steps were made. Name later ones.")
        self._begin_if_due()

    @property
    def _done(self) -> int:
        return self._session.objects.num_steps

    def after_step(self, optimizer: Optimizer) -> None:
        """Begin before the first step, and write the file after the last."""
        if self._profiler is None:
            self._begin_if_due()
        elif self._done + 1 >= self._steps.stop:
            self._end()

    def closing(self) -> None:
        """Write what there is of a loop that has ended before."""
        if self._profiler is not None:
            self._end()
        else:
            report = self._session.runtime.report
            report(f"No trace: the loop ended after {self._done} steps, before {self._steps}.")

    def removed(self) -> None:
        """Stop the profiler of a loop that an exception has ended."""
        if self._profiler is not None:
            self._profiler.stop()

    def _begin_if_due(self) -> None:
        if self._done + 1 >= self._steps.start:
            profiler = profile()
            profiler.start()
            self._profiler = profiler

    def _end(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()  # waits for the device
        first, last = self._steps.start, max(self._steps.start, min(self._done, self._steps.stop - 1))
        collective, own, parts = self._session.runtime.collective, _events_of(profiler), list[bytes]()
        readings: list[int] = []
        for _ in range(NUM_READINGS):
            collective.add_number(1.0)
            readings.append(time.time_ns())
        ahead = ahead_us(collective.all_gather_object((socket.gethostname(), readings)))
        for rank in range(collective.size):
            part = collective.broadcast_object(own if rank == collective.rank else None, rank)
            parts += [part] if collective.rank == 0 else []
        if parts:
            self._write(f"trace-{first}-{last}", [first, last], parts, ahead)
        self._session.moments.remove(self)

    def _write(self, name: str, steps: list[int], parts: Sequence[bytes], ahead: Sequence[float]) -> None:
        """Write the trace and its summary. On rank 0. One rank's events at a time are unpacked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file, base_ns, summaries = self._folder / f"{name}.json.gz", 0, []
        with gzip.open(file, "wt", encoding="utf-8") as output:
            for rank, packed in enumerate(parts):
                part = json.loads(gzip.decompress(packed))
                base_ns = base_ns or part["base_ns"]
                start = f'{{"baseTimeNanoseconds": {base_ns}, "displayTimeUnit": "ms", "traceEvents": [\n'
                later_us = (part["base_ns"] - base_ns) / 1000 - ahead[rank]
                events = in_rows(part["events"], rank, part["host"], later_us)
                output.write((",\n" if rank else start) + ",\n".join(map(json.dumps, events)))
                summaries.append({"rank": rank, "host": part["host"], **summary(part["events"])})
            output.write("\n]}\n")
        described = json.dumps({"steps": steps, "file": file.name, "ranks": summaries}, indent=1)
        (self._folder / f"{name}.summary.json").write_text(described, encoding="utf-8")
        report = self._session.runtime.report
        report(f"Trace of steps {steps[0]} to {steps[1]}: {file}. Open it at https://ui.perfetto.dev")


def _events_of(profiler: profile) -> bytes:
    """The events of this rank, as Chrome's trace format has them, packed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
    events = [event for event in trace["traceEvents"] if isinstance(event.get("pid"), int)]
    part = {"host": socket.gethostname(), "base_ns": trace.get("baseTimeNanoseconds", 0), "events": events}
    return gzip.compress(json.dumps(part).encode(), compresslevel=1)


def ahead_us(readings: Sequence[tuple[str, Sequence[int]]]) -> list[float]:
    """How far the clock of each rank is ahead of that of rank 0. `readings`: hosts, and common moments in ns."""
    here, zero = readings[0]
    differences: dict[str, list[int]] = {}
    for host, times in readings:
        differences.setdefault(host, []).extend(one - other for one, other in zip(times, zero, strict=True))
    return [0.0 if host == here else median(differences[host]) / 1000 for host, _ in readings]


def in_rows(events: Sequence[Event], rank: int, host: str, shift_us: float) -> Iterator[Event]:
    """The events of a rank, later by `shift_us`, each process in a row of its own that has the rank in its name."""
    labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    pids = list(dict.fromkeys(event["pid"] for event in events if event["ph"] != "M"))
    rows = {pid: rank * ROWS_OF_A_RANK + number for number, pid in enumerate(pids)}
    for pid, row in rows.items():
        name = f"rank {rank}: {labels.get(pid, 'CPU')} ({host})"
        yield {"ph": "M", "pid": row, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": row, "tid": 0, "ts": 0, "name": "process_sort_index", "args": {"sort_index": row}}
    for event in events:
        if event["pid"] in rows and not event["name"].startswith("process_"):
            ids = {"id": f"{rank}/{event['id']}"} if "id" in event else {}
            yield {**event, **ids, "pid": rows[event["pid"]], "ts": event["ts"] + (event["ph"] != "M") * shift_us}


def summary(events: Sequence[Event]) -> dict[str, float]:
    """How long a rank computed, how long collectives ran, and how much of that was exposed: beside no computation."""
    spans = [(event, (event["ts"], event["ts"] + event["dur"])) for event in events if event["ph"] == "X"]
    has_kernels = any(event.get("cat") == "kernel" for event, _ in spans)
    collectives, computation = [], []
    for event, span in spans:
        name, kind = event["name"], event.get("cat")
        if (kind == "kernel" and "ccl" in name.lower()) or name.startswith("gloo:"):
            collectives.append(span)
        elif kind == "kernel" or (not has_kernels and name.startswith("aten::")):
            computation.append(span)
    collective, computing = covered(collectives), covered(computation)
    overlapped = collective + computing - covered([*collectives, *computation])
    ends = [span for _, span in spans]
    return {
        "seconds": (max(map(max, ends)) - min(map(min, ends))) / 1e6 if ends else 0.0,
        "compute_seconds": computing / 1e6,
        "collective_seconds": collective / 1e6,
        "overlapped_seconds": overlapped / 1e6,
        "exposed_seconds": (collective - overlapped) / 1e6,
        "num_collectives": len(collectives),
    }


def covered(intervals: Sequence[Interval]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
