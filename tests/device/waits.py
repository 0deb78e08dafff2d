"""How often the host waits for the device, and where.

    with counting() as waits:
        step()
    assert waits.lines == []

Counted are the waits of this process, in all of its threads: synchronising a stream, an event or a device; copies from
and to memory that is not pinned; kernels whose result has a size that only the device knows. A query is no wait. A
count is exact, and the same on every machine.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pretended_cuda
import torch

_OTHERS = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"] + "/", "<frozen", "<string>", __file__)
_PACKAGES = sysconfig.get_paths()["purelib"]


@dataclass(slots=True)
class Waits:
    """What was counted."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    """Of each wait, the kind, and the first line outside of torch and of Python's library: `fabric/fabric.py:123`."""
    races: list[tuple[str, str]] = field(default_factory=list)
    """Of each race, what it was, and the line."""

    @property
    def total(self) -> int:
        """The number of waits."""
        return len(self.lines)


_counting: list[Waits] = []


@contextmanager
def counting() -> Iterator[Waits]:
    """Count within a block. Blocks may be nested."""
    waits = start()
    try:
        yield waits
    finally:
        stop(waits)


def start() -> Waits:
    """Count from here on, where a block is not at hand: in a rank, until it ends."""
    waits = Waits()
    _counting.append(waits)
    pretended_cuda.listen(_hear)
    return waits


def stop(waits: Waits) -> None:
    """Count no longer."""
    _counting[:] = [other for other in _counting if other is not waits]
    if not _counting:
        pretended_cuda.listen(None)


def _hear(kind: str, detail: str) -> None:
    line = _line(sys._getframe())
    for waits in list(_counting):
        if kind == "race":
            waits.races.append((detail, line))
        else:
            waits.lines.append((detail if kind == "kernel" else kind, line))


def _line(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    if frame is None:
        return "a thread of torch"
    path = Path(frame.f_code.co_filename)
    for root in (_PACKAGES, Path.cwd()):
        if path.is_relative_to(root):
            path = path.relative_to(root)
    return f"{path}:{frame.f_lineno}"
