"""What a rank does at this moment, as it tells the others. Knows words and numbers, no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["collective", "loader", "python", "silent", "ended"]

WORLD = "of all ranks"
"""The name here of the process group that all ranks are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective that a rank has started."""

    group: str
    """The process group, as all of its ranks name it."""
    number: int
    """Its place among the calls of that group, from 1: what the backend matches calls by."""
    operation: str
    """`all_reduce of float32 (20,)`."""
    where: str
    """The user's line: `train.py:12 in main`."""
    started_ns: int
    """`time.time_ns` of the rank's node."""
    timeout_seconds: float = 0.0
    """How long the group waits for it; 0: unknown."""
    pending: bool = False

    def seconds(self, now_ns: int) -> float:
        """How long ago it was started."""
        return max(0.0, (now_ns - self.started_ns) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A rank, and what it does."""

    rank: int
    kind: Kind
    words: str
    """What it does, without the rank and the time."""
    where: str = ""
    """The user's line at which the rank's Python is; empty where it is that of the collective, or unknown."""
    seconds: float | None = None
    """For how long: of the collective, or since the last one; None: unknown."""
    calls: tuple[Call, ...] = ()
    """The last collectives, oldest first. Only where they were asked for."""

    def to_bytes(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Activity:
        """As it was. Raises ValueError, TypeError or KeyError where the bytes are something else."""
        fields: Mapping[str, Any] = json.loads(content)
        return cls(**{**fields, "calls": tuple(Call(**call) for call in fields["calls"])})
