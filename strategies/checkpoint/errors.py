"""What is raised where a checkpoint could not be written or read."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Carries the rank that failed; the cause is chained there."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
