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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, final

import torch
from torch.optim import Optimizer
from torch.profiler import profile

from fabric.checks.check import Check
from fabric.strategies.runtime import Runtime

Event: TypeAlias = dict[str, Any]
Interval: TypeAlias = tuple[float, float]
NUM_READINGS = 5
"""How often the clocks are read together. Not measured."""
ROWS_OF_A_RANK = 1000
"""The rows of rank r have the numbers from this times r on."""
WAITS = (
    "c10d::",
    "_c10d_functional::",
    "autograd::",
    "torch::autograd::",
    "torch.distributed.",
    "torch::distributed::",
)
"""Operators that issue collectives or wait for them, and ranges around others."""


@final
class Trace(Check):
    """Traces `steps` of one fabric: of the optimizer that steps most, counted from 1.

    `num_steps`: how many were made. `remove`: called once the trace is written. Ranks: all, with the same steps.
    """

    def __init__(
        self,
        steps: range,
        folder: Path,
        runtime: Runtime,
        num_steps: Callable[[], int],
        remove: Callable[["Trace"], None],
    ) -> None:
        done = num_steps()
        if not isinstance(steps, range) or steps.step != 1 or not 1 <= steps.start < steps.stop:
            raise ValueError(
                f"`fabric.trace(steps={steps!r})`: write the numbers of steps as `range(10, 12)`, from 1 on."
            )
        if steps.start <= done:
            raise ValueError(f"`fabric.trace(steps={steps!r})`: {done} steps were made. Name later ones.")
        self._steps, self._folder, self._runtime = steps, folder, runtime
        self._num_steps, self._remove = num_steps, remove
        self._profiler: profile | None = None
        self._begin_if_due()

    def after_step(self, optimizer: Optimizer) -> None:
        """Begin before the first step, and write the file after the last."""
        if self._profiler is None:
            self._begin_if_due()
        elif self._num_steps() + 1 >= self._steps.stop:
            self._end()

    def closing(self) -> None:
        """Write what there is of a loop that has ended before."""
        if self._profiler is not None:
            self._end()
        else:
            self._runtime.report(f"No trace: the loop ended after {self._num_steps()} steps, before {self._steps}.")

    def removed(self) -> None:
        """Stop the profiler of a loop that an exception has ended."""
        if self._profiler is not None:
            self._profiler.stop()

    def _begin_if_due(self) -> None:
        if self._num_steps() + 1 >= self._steps.start:
            self._profiler = profile()
            self._profiler.start()

    def _end(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        if self._runtime.device.type != "cpu":
            torch.accelerator.synchronize()  # the device's part of the steps
        profiler.stop()
        first, last = self._steps.start, max(self._steps.start, min(self._num_steps(), self._steps.stop - 1))
        parts = self._gathered(_events_of(profiler))
        if self._runtime.world.is_global_zero:
            self._write(parts, first, last)
        else:
            deque(parts, maxlen=0)
        self._remove(self)

    def _write(self, parts: Iterator[tuple[dict[str, Any], float]], first: int, last: int) -> None:
        """Write the trace and its summary. On rank 0."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file, base_ns, summaries = self._folder / f"trace-{first}-{last}.json.gz", 0, []
        with gzip.open(file, "wt", encoding="utf-8") as output:
            for rank, (part, ahead) in enumerate(parts):
                base_ns = base_ns or part["base_ns"]
                start = f'{{"baseTimeNanoseconds": {base_ns}, "displayTimeUnit": "ms", "traceEvents": [\n'
                later_us = (part["base_ns"] - base_ns) / 1000 - ahead
                events = in_rows(part["events"], rank, part["host"], later_us)
                output.write((",\n" if rank else start) + ",\n".join(map(json.dumps, events)))
                summaries.append({"rank": rank, "host": part["host"], **summary(part["events"])})
            output.write("\n]}\n")
        described = {"steps": [first, last], "file": file.name, "ranks": summaries}
        file.with_name(f"trace-{first}-{last}.summary.json").write_text(
            json.dumps(described, indent=1), encoding="utf-8"
        )
        self._runtime.report(f"Trace of steps {first} to {last}: {file}. Open it at https://ui.perfetto.dev")

    def _gathered(self, own: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
        """The events of each rank, in rank order, and how far its clock is ahead, in us. On rank 0; elsewhere none.

        One rank's events at a time are held besides the own. Ranks: all.
        """
        collective = self._runtime.collective
        readings: list[int] = []
        for _ in range(NUM_READINGS):
            collective.add_number(1.0)
            readings.append(time.time_ns())
        offsets_us = ahead_us(collective.all_gather_object((own["host"], readings)))
        packed = gzip.compress(json.dumps(own).encode(), compresslevel=1)
        for rank in range(collective.size):
            part = collective.broadcast_object(packed if rank == collective.rank else None, rank)
            if collective.rank == 0:
                yield (own if rank == 0 else json.loads(gzip.decompress(part))), offsets_us[rank]


def _events_of(profiler: profile) -> dict[str, Any]:
    """The events of this rank, as Chrome's trace format has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
    events = [event for event in trace["traceEvents"] if isinstance(event.get("pid"), int)]
    return {"host": socket.gethostname(), "base_ns": trace.get("baseTimeNanoseconds", 0), "events": events}


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
        elif kind == "kernel" or (not has_kernels and kind == "cpu_op" and "::" in name and not name.startswith(WAITS)):
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
