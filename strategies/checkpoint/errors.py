"""The error of saving and loading checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. `rank`: the rank that failed; only there, the cause is chained."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
