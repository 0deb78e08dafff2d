"""What one rank measured in one window of steps, and the row of numbers in which it is sent to the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final
from zlib import crc32

import torch
from torch import Tensor

from fabric.launchers.environments.defaults import NUM_CALLS
from fabric.launchers.watch.table import Call

PHASES = ("data", "forward", "backward", "optimizer", "waiting", "saving", "other")
DATA, FORWARD, BACKWARD, OPTIMIZER, WAITING, SAVING, OTHER = range(7)
STEP = 7
"""Marks the end of a step."""
NUM_LAST = 16
"""The steps at the end of a window whose collectives are compared: torch keeps the last 256 calls. The saves of the
window stand behind them, as one more."""
MEMORY = ("device_memory_bytes", "device_memory_peak_bytes", "host_memory_bytes", "host_memory_peak_bytes")
AS_MEASURED = ("loss", "gradient_norm", "learning_rate", "num_skipped_steps", *MEMORY)
"""The numbers that are shown as one rank has them."""
NUMBERS = ("num_steps", "seconds", "samples", "tokens", "flops", "num_saves", "node", *AS_MEASURED, *PHASES)
"""The numbers of one rank."""
_UNKNOWN = float("-inf")

_COLUMNS = len(PHASES) + 2


@final
@dataclass(slots=True)
class Step:
    """One step: seconds by phase, and when its backward and the step were over, in seconds of the system's clock."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    backward_end: float = float("nan")
    queued: float = 0.0
    """How long its thread was ready to run, and its processor ran another."""
    segments: list[tuple[int, float, float]] = field(default_factory=list)
    """Phase, begin and end."""


def steps_of(marks: Sequence[int], began_ns: int) -> list[Step]:
    """The steps of a window. `marks`: a phase and the time at which it ended, again and again."""
    steps, step, before = list[Step](), Step(), began_ns
    for phase, now in zip(marks[::2], marks[1::2], strict=True):
        if phase == STEP:
            steps.append(step)
            step = Step()
            continue
        now = max(now, before)
        step.seconds[phase] += (now - before) / 1e9
        step.segments.append((phase, before / 1e9, now / 1e9))
        if phase == BACKWARD:
            step.backward_end = now / 1e9
        before = now
    return steps


@final
@dataclass(frozen=True, slots=True)
class Arrival:
    """A collective that this rank has called, and in which of the last steps and phase."""

    key: float
    """The same on all ranks that take part, and for no other call."""
    late: float
    """The greatest of all ranks has arrived last: when it arrived, or minus how long the device was in the call."""
    place: int
    """Step times 8 and phase, times 2; odd if it runs while the phase goes on, as an all-reduce in backward does."""


def arrivals(calls: Sequence[Call], steps: Sequence[Step]) -> list[Arrival]:
    """The calls within these steps, newest last, and of no step a part: torch keeps the last `NUM_CALLS`."""
    spans = [(*segment, index) for index, step in enumerate(steps) for segment in step.segments]
    found, at = list[Arrival](), 0
    for call in calls:
        began = call.started_ns / 1e9
        while at < len(spans) and spans[at][2] < began:
            at += 1
        if at == len(spans):
            break
        phase, start, _, index = spans[at]
        if began < start or (call.is_on_device and call.device_seconds is None):
            continue
        overlaps = phase == BACKWARD and call.operation.startswith("all_reduce")
        late = began if call.device_seconds is None else -call.device_seconds
        group = crc32(call.group.encode()) % 2**20  # a float64 has 52 bits
        found.append(Arrival(float(group * 2**32 + call.number % 2**32), late, 2 * (8 * index + phase) + overlaps))
    # A recorder that has a call from before these steps has all of theirs. Devices have a recorder of their own.
    before = {call.is_on_device for call in calls if call.started_ns / 1e9 < spans[0][1]}
    has_all = len(calls) < NUM_CALLS or all(call.is_on_device in before for call in calls)
    is_cut = len(found) > NUM_CALLS or not has_all
    found = found[-NUM_CALLS:]
    return [each for each in found if each.place // 16 > found[0].place // 16] if is_cut else found


def pack(numbers: dict[str, float], last: Sequence[Step], found: Sequence[Arrival]) -> Tensor:
    """The row of one rank. `last`: at most `NUM_LAST` steps, and the saves behind them."""
    num_missing = NUM_LAST + 1 - len(last)
    row = [numbers.get(name, _UNKNOWN) for name in NUMBERS] + [float("nan")] * (num_missing * _COLUMNS)
    for step in last:
        row += (*step.seconds, step.backward_end, step.queued)
    for each in found:
        row += (each.key, each.late, each.place + 16 * num_missing)
    return torch.tensor(row + [float("nan")] * (3 * (NUM_CALLS - len(found))), dtype=torch.float64)


@final
class Gathered:
    """The rows of all ranks. Dims: R ranks, S last steps and the saves, P phases, C calls."""

    def __init__(self, rows: Tensor) -> None:
        numbers, steps, calls = rows.split_with_sizes((len(NUMBERS), (NUM_LAST + 1) * _COLUMNS, 3 * NUM_CALLS), 1)
        known = [zip(NUMBERS, row, strict=True) for row in numbers.tolist()]
        self.numbers = [{name: number for name, number in each if number != _UNKNOWN} for each in known]
        steps_rs = steps.view(len(rows), NUM_LAST + 1, _COLUMNS)
        self.seconds_rsp, self.backward_end_rs, self.queued_rs = steps_rs[..., :7], steps_rs[..., 7], steps_rs[..., 8]
        self.calls_rc = calls.view(len(rows), NUM_CALLS, 3)

    def waits(self) -> Tensor:
        """(R, S, P): how long each rank waited for others in each phase; NaN for steps whose calls are not all known.

        The last to arrive at a collective does not wait, and the others wait as much longer as they arrived earlier. A
        backward that sends gradients while it goes on waits at its end alone: as long as at the call at which this
        rank was earliest.
        """
        known_rc = ~self.calls_rc[..., 0].isnan()
        ranks, phases = known_rc.nonzero()[:, 0], len(PHASES)
        keys, late, place = self.calls_rc[known_rc].unbind(1)
        late = late - self._clocks()[ranks] * (late > 0)
        _, call = keys.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        latest = torch.full((len(keys) + 1,), -torch.inf, dtype=torch.float64).scatter_reduce(0, call, late, "amax")
        wait, at = latest[call] - late, place.long()
        cell = (ranks * (NUM_LAST + 1) + at // 16) * phases + at // 2 % 8
        overlaps = at % 2 == 1
        empty = torch.zeros(self.seconds_rsp.numel(), dtype=torch.float64)
        whole = empty.index_add(0, cell[~overlaps], wait[~overlaps])
        whole += empty.scatter_reduce(0, cell[overlaps], wait[overlaps], "amax")
        waits_rsp = whole.view(self.seconds_rsp.shape)
        first = torch.where(known_rc, self.calls_rc[..., 2], torch.inf).amin(1) // 16
        is_before = torch.arange(NUM_LAST) < first.nan_to_num(nan=-1, posinf=-1).amax()  # what was before is forgotten
        waits_rsp[:, :NUM_LAST][:, is_before] = torch.nan
        return torch.minimum(waits_rsp, self.seconds_rsp)

    def _clocks(self) -> Tensor:
        """(R,): how far the clock of each rank's node is ahead. All ranks leave a backward at the same time."""
        nodes = torch.tensor([each["node"] for each in self.numbers])
        ahead = (self.backward_end_rs - self.backward_end_rs[:1]).nanmedian(1).values
        of_node = [ahead[nodes == node].nanmedian() for node in nodes]
        clocks = torch.stack(of_node).nan_to_num()
        return clocks - clocks[0]
