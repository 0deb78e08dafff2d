"""The check that measures a run on every rank, and shows, logs and writes on rank 0 what all ranks measured.

In a step it notes the time at which each phase ends, and on an accelerator records an event there. At the end of a
window of steps each rank makes one row of numbers, and an all-gather that no rank waits for brings the rows together:
they are read one step later. Events are read a window later, when they are done. So the monitor waits for no device,
and calls six functions in a step.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import time, time_ns
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric.checks.check import Check
from fabric.launchers.environments.defaults import NUM_CALLS
from fabric.monitor import window
from fabric.monitor.flops import ModelFlops, device_name, known_peak, measured_peak
from fabric.monitor.results import Results
from fabric.monitor.window import PHASES, Arrival, Step, arrivals, pack, steps_of
from fabric.output.progress import first_dim
from fabric.session import Session
from fabric.strategies.accelerators.torch_accelerator import has_streams
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.collectives.flight_recorder import FlightRecorder
from fabric.strategies.data.cursor import Iteration
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.prepared import Prepared

WINDOW_SECONDS = 5.0
_FIRST_WINDOW = 5
_SCHEDULED = "/proc/thread-self/schedstat"
"""Nanoseconds that this thread ran, and that it was ready while its processor ran others. Linux has it."""


@final
@dataclass(slots=True)
class _Open:
    """A window while its steps run."""

    began_ns: int
    marks: list[int] = field(default_factory=list)
    """A phase and the time at which it ended, again and again."""
    events: list[tuple[int, Any]] = field(default_factory=list)
    """On an accelerator: a phase and the event at its end."""
    numbers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float, samples=0.0))
    loss: float | Tensor | None = None
    """Of the latest backward."""
    given: dict[str, Any] = field(default_factory=dict)
    """The loss and norm that the program gives, which may be tensors on the device."""
    calls_of_saves: list[Arrival] = field(default_factory=list)
    scheduled: list[bytes] = field(default_factory=list)
    """What Linux says of this thread at the end of each step."""
    steps: list[Step] = field(default_factory=list)
    found: list[Arrival] = field(default_factory=list)
    """Of the last steps, once the window is over."""


@final
class Monitor(Check):
    """What `Fabric.monitor` returns. Ranks: all make one, and call `add` each with its own counts."""

    def __init__(
        self,
        session: Session,
        loggers: Sequence[Any],
        folder: str | os.PathLike[str] | None,
        window_steps: int | None,
        *,
        show: bool,
    ) -> None:
        if window_steps is not None and (isinstance(window_steps, bool) or window_steps < 1):
            raise ValueError(f"`fabric.monitor(window_steps={window_steps!r})`: a window has 1 step or more.")
        if session.runtime.device.type == "xla":
            raise ValueError(
                "`fabric.monitor()` reads numbers in a step, and on `xla` a step is recorded, and runs as one graph. "
                "Use `fabric.progress` for samples per second, and `torch_xla.debug.profiler`."
            )
        if any(isinstance(check, Monitor) for check in session.moments.checks):
            raise RuntimeError("`fabric.monitor()` was called twice. Keep what the first call returned.")
        self._runtime, self._set_up = runtime, set_up = session.runtime, session.objects
        path = folder or session.log_dir
        self._results = Results(runtime, set_up.strategy_name, loggers, Path(path) if path else None, show=show)
        session.describe(folder)
        self._window_steps = window_steps
        self._recorder = FlightRecorder()
        self._paths: WeakSet[ForwardPath] = WeakSet()
        self._stream_device = runtime.device if has_streams(runtime.device) else None
        self._counts: dict[int, int] = {}
        """Steps by optimizer."""
        self._num_steps, self._due, self._window_end = 0, 1, 0
        self._flops: ModelFlops | None = None
        self._flops_per_sample = self._flops_per_step = 0.0
        self._is_in_forward = False
        self._scheduled = os.open(_SCHEDULED, os.O_RDONLY) if Path(_SCHEDULED).exists() else None
        self._now = _Open(time_ns())
        self._before: _Open | None = None
        """On an accelerator: the window whose events are not read yet."""
        self._rows: Callable[[], None] | None = None
        """Receives the rows that are on their way."""
        for model in set_up.models.values():
            self.model_set_up(model)

    @property
    def latest(self) -> Mapping[str, float]:
        """The numbers of the latest window, on rank 0: see the table in docs/how-to/monitor.md."""
        return self._results.latest

    def add(
        self,
        *,
        samples: float = 0,
        tokens: float = 0,
        loss: float | Tensor | None = None,
        gradient_norm: float | Tensor | None = None,
    ) -> None:
        """Count samples and tokens that this rank has processed since the last call, and take note of the latest loss
        and norm of the gradient. Samples of prepared loaders are counted without it, and the loss is that of
        `fabric.backward` unless one is given. A tensor on a device is not waited for.

        Raises: ValueError: a count is negative. TypeError: it is no number.
        """
        for name, count in (("samples", samples), ("tokens", tokens)):
            if not isinstance(count, int | float):
                raise TypeError(
                    f"`monitor.add({name}=...)` was given a `{type(count).__name__}`. Write a number, such as "
                    "`tokens=batch.numel()`: the sum of a tensor would be waited for."
                )
            if count < 0:
                raise ValueError(f"`monitor.add({name}={count})`: write how many came since the last call, 0 or more.")
            if count:
                self._now.numbers[name] += count
        given = {"loss": loss, "gradient_norm": gradient_norm}
        self._now.given |= {name: value for name, value in given.items() if value is not None}

    def model_set_up(self, model: Prepared) -> None:
        model.path.on_call = self._forward_begins
        self._paths.add(model.path)

    def batch_received(self, batch: Any, source: object) -> None:
        if not isinstance(source, Iteration):  # a micro-batch, which was received before
            return
        now = self._now
        now.marks += (window.OTHER, source.asked_ns, window.DATA, time_ns())
        self._is_in_forward = False
        first = next(iter(batch.values()), None) if isinstance(batch, dict) else batch
        first = first[0] if isinstance(first, list | tuple) and first else first
        # `first_dim` is one call more
        now.numbers["samples"] += first.shape[0] if isinstance(first, Tensor) and first.dim() else first_dim(batch)

    def _forward_begins(self) -> None:
        if not self._is_in_forward and torch.is_grad_enabled():
            self._is_in_forward, marks = True, self._now.marks
            marks += (window.FORWARD if marks and marks[-2] == window.DATA else window.OTHER, time_ns())
            if self._stream_device is not None:
                self._now.events.append((window.OTHER, _recorded(self._stream_device)))

    def compared(self) -> None:
        self._results.write("sanitizer", step=self._set_up.num_steps + 1)

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self._now.marks += (window.FORWARD, time_ns())
        if self._stream_device is not None:
            self._now.events.append((window.FORWARD, _recorded(self._stream_device)))
        if self._flops is not None:
            self._flops.is_in_backward = True

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        now = self._now
        now.marks += (window.BACKWARD, time_ns())
        self._is_in_forward = False
        if self._stream_device is not None:
            now.events.append((window.BACKWARD, _recorded(self._stream_device)))
        now.loss = loss.detach()
        if self._flops is not None:
            self._flops.is_in_backward = False

    def after_step(self, optimizer: Optimizer) -> None:
        now, at = self._now, time_ns()
        is_next = bool(now.marks) and now.marks[-2] in (window.BACKWARD, window.OPTIMIZER, window.STEP)
        now.marks += (window.OPTIMIZER if is_next else window.OTHER, at)
        if optimizer.step_was_skipped:  # type: ignore[attr-defined]  # every optimizer that was set up has it
            now.numbers["num_skipped_steps"] += 1
            self._results.write("skipped", step=self._set_up.num_steps)
        count = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if count <= self._num_steps:
            return
        self._num_steps = count
        now.marks += (window.STEP, at)
        if self._scheduled is not None:
            now.scheduled.append(os.pread(self._scheduled, 99, 0))
        if self._stream_device is not None:
            now.events.append((window.OPTIMIZER, _recorded(self._stream_device)))
        if count >= self._due:
            self._act(optimizer)

    def saving(self) -> None:
        self._now.marks += (window.OTHER, time_ns())

    def saved(self, path: str, is_blocking: bool) -> None:
        now, at = self._now, time_ns()
        seconds = (at - now.marks[-1]) / 1e9
        save = steps_of((window.SAVING, at, window.STEP, at), now.marks[-1])
        now.calls_of_saves += arrivals(self._recorder.calls(with_lines=False), save)
        now.numbers["num_saves"] += 1
        now.marks += (window.SAVING, at)
        self._results.write("save", step=self._set_up.num_steps, seconds=seconds, path=path, is_blocking=is_blocking)

    def loaded(self) -> None:
        self._results.write("load", step=self._set_up.num_steps)

    def closing(self) -> None:
        """Receive rows that are on their way, and send no others: a rank that has failed does not send its own."""
        with suppress(CollectiveError):
            self._finish()
        self._results.write("end", step=self._set_up.num_steps)

    def removed(self) -> None:
        for path in self._paths:
            path.on_call = None
        if self._flops is not None:
            self._flops.stop()
        self._results.close()
        if self._scheduled is not None:
            os.close(self._scheduled)

    def _act(self, optimizer: Optimizer) -> None:
        """Called after a step at which there is something to do. Ranks: all."""
        number = self._num_steps
        if number == 1:
            self._flops, self._due = ModelFlops([model.module for model in self._set_up.models.values()]), 2
            self._flops.start()
        elif self._flops is not None:
            self._count_flops(self._flops.stop())
            self._flops = None
            self._window_end = self._due = number + self._length()
        else:
            self._finish()
            if number >= self._window_end:
                self._end_window(optimizer)
                self._window_end = number + self._length()
            self._due = number + 1 if self._rows is not None else self._window_end
            return
        self._now = _Open(time_ns())

    def _count_flops(self, flops: int) -> None:
        samples, device = self._now.numbers["samples"], self._runtime.device
        self._flops_per_step, self._flops_per_sample = flops, flops / samples if samples else 0.0
        dtype = self._runtime.precision.compute_dtype
        name = device_name(device)
        peak = known_peak(name, dtype)
        if peak is None and device.type == "cpu":
            peak = measured_peak(dtype), "measured by a matrix product"
        if peak is None:
            self._runtime.report(f"`fabric.monitor` shows no MFU: it does not know the peak of `{name}` in {dtype}.")
            return
        self._results.peak = peak[0]
        self._results.write("peak", flops_per_step=flops, peak_flops_per_second=peak[0], peak_source=peak[1])

    def _length(self) -> int:
        """The number of steps of the next window, the same on all ranks."""
        return self._window_steps or max(_FIRST_WINDOW, round(WINDOW_SECONDS / self._results.step_seconds))

    def _end_window(self, optimizer: Optimizer) -> None:
        over, self._now = self._now, _Open(time_ns())
        over.steps = steps_of(over.marks, over.began_ns)
        queued = [int(each.split()[1]) / 1e9 for each in over.scheduled]
        for step, (before, after) in zip(over.steps[1:], pairwise(queued), strict=False):
            step.queued = after - before
        last, device, numbers = over.steps[-window.NUM_LAST :], self._runtime.device, over.numbers
        if self._runtime.world.size > 1:
            over.found = arrivals(self._recorder.calls(with_lines=False), last)
        numbers |= {"num_steps": len(over.steps), "seconds": (self._now.began_ns - over.began_ns) / 1e9}
        numbers["node"] = self._runtime.world.node_rank
        samples = numbers["samples"]
        numbers["flops"] = self._flops_per_sample * samples if samples else self._flops_per_step * len(over.steps)
        if "lr" in optimizer.param_groups[0]:
            numbers["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        numbers |= _memory(device)
        given = over.given if over.loss is None else {"loss": over.loss, **over.given}
        over.given = {name: _on_the_way(value) for name, value in given.items()}
        due: _Open | None = over
        if self._stream_device is not None:
            over.events.append((window.STEP, _recorded(self._stream_device)))
            due, self._before = self._before, over
        if due is not None:
            self._send(due)

    def _send(self, over: _Open) -> None:
        """Start the all-gather of a window. Ranks: all."""
        numbers, last = over.numbers, over.steps[-window.NUM_LAST :]
        if over.events and over.events[-1][1].query():
            _on_device(over.steps, over.events[:-1])
        if not over.events or over.events[-1][1].query():
            numbers |= {name: float(value) for name, value in over.given.items()}
        numbers |= {name: sum(step.seconds[phase] for step in over.steps) for phase, name in enumerate(PHASES)}
        saved = [0.0] * len(PHASES)
        saved[window.SAVING] = numbers["saving"]
        found = [*over.found, *(replace(each, place=each.place + 16 * len(last)) for each in over.calls_of_saves)]
        if len(found) > NUM_CALLS:
            found, saved = over.found, [float("nan")] * 7
        row = pack(numbers, [*last, Step(seconds=saved)], found)
        collective = self._runtime.collective
        receive = collective.start_all_gather(row) if collective.size > 1 else lambda: row[None]
        self._rows = partial(self._results.window, receive, self._set_up.num_steps, time())

    def _finish(self) -> None:
        """Receive the rows of all ranks, if they are on their way."""
        if self._rows is not None:
            receive, self._rows = self._rows, None
            receive()


def _recorded(device: torch.device) -> Any:
    event = torch.Event(device.type, enable_timing=True)
    event.record()
    return event


def _on_device(steps: list[Step], events: list[tuple[int, Any]]) -> None:
    """Replace the seconds of forward, backward and step by those of the device, from events that are done."""
    at = iter(pairwise(events))
    for step in steps:
        of_device = [0.0] * len(PHASES)
        for (_, begin), (phase, end) in at:
            of_device[phase] += begin.elapsed_time(end) / 1e3
            if phase == window.OPTIMIZER:
                break
        gap = of_device[window.OTHER]
        of_device[window.DATA] = min(step.seconds[window.DATA], gap)
        of_device[window.SAVING] = min(step.seconds[window.SAVING], gap - of_device[window.DATA])
        of_device[window.OTHER] = gap - of_device[window.DATA] - of_device[window.SAVING]
        step.seconds = of_device


def _on_the_way(value: Any) -> Any:
    """A number, or a copy of it on the host that arrives later."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        return float("nan")
    if not has_streams(value.device):
        return value.item()
    copy = torch.empty((), dtype=value.dtype, pin_memory=True)
    return copy.copy_(value.detach().reshape(()), non_blocking=True)


def _memory(device: torch.device) -> dict[str, float]:
    found = dict[str, float]()
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if sys.platform == "linux":
            found["host_memory_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        found["host_memory_peak_bytes"] = max(peak, *found.values(), 0)  # which Linux counts coarsely
    if has_streams(device):
        found["device_memory_bytes"] = torch.accelerator.memory_allocated(device)
        found["device_memory_peak_bytes"] = torch.accelerator.max_memory_allocated(device)
    return found
