"""What a rank is doing at this moment, in the form in which it is sent to other ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["collective", "loader", "python", "silent", "gone"]

WORLD = "of all ranks"
"""How the process group of all ranks is named here."""
GRADIENTS = "gradients"
CALLS = "calls of fabric"
"""The descriptions of others of all ranks, see `process_group.py`."""
ELSEWHERE = "Python is at "
"""Begins `Activity.where` if the call goes on in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective that a rank has started."""

    group: str
    """The name of the process group, the same on all of its ranks."""
    number: int
    """The number of the call within that group, from 1. The backend matches calls by it."""
    operation: str
    """`all_reduce of float32 (20,)`."""
    where: str
    """The user's line: `train.py:12 in main`."""
    started_ns: int
    """`time.time_ns` of the rank's node."""
    timeout_seconds: float = 0.0
    """The timeout of the group; 0: unknown."""
    pending: bool = False
    is_on_device: bool = False
    """Whether an accelerator runs it: its timeout raises nothing in the thread that has made it."""

    def seconds(self, now_ns: int) -> float:
        """How long ago it was started."""
        return max(0.0, (now_ns - self.started_ns) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one rank is doing."""

    rank: int
    kind: Kind
    words: str
    """Describes the activity, without rank and time."""
    where: str = ""
    """The user's line at which the rank's Python is; empty if it is the collective's line, or unknown."""
    seconds: float | None = None
    """Duration of the collective, or the time since the last one; None: unknown."""
    calls: tuple[Call, ...] = ()
    """The last collectives that are recorded, oldest first."""

    def to_bytes(self) -> bytes:
        """Serialize."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Activity:
        """Deserialize. Raises ValueError, TypeError or KeyError if the bytes are something else."""
        fields: Mapping[str, Any] = json.loads(content)
        return cls(**{**fields, "calls": tuple(Call(**call) for call in fields["calls"])})
