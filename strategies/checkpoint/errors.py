"""The errors of saving and loading checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. `rank`: the rank that failed; only there, the cause is chained."""

    def __init__(self, message: str, *, rank: int = -1) -> None:  # -1: until pickle sets it
        super().__init__(message)
        self.rank = rank


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is nothing at the path."""


class CheckpointEntryError(CheckpointError, KeyError):
    """The checkpoint lacks entries that were asked for."""

    __str__ = RuntimeError.__str__  # that of KeyError quotes


def sentence_of(problem: BaseException) -> str:
    """The type and message of an exception, to be sent to other ranks."""
    return f"{type(problem).__name__}: {problem}"
