"""The errors of saving and loading, and how every rank raises the error of one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, TypeVar, cast

from fabric.strategies.collectives.collective import Collective

T = TypeVar("T")
Doing: TypeAlias = Literal["read", "write"]


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


class CommittedError(CheckpointError):
    """The checkpoint is complete, but `after_commit` failed."""


def sentence_of(problem: BaseException) -> str:
    """The type and message of an exception, to be sent to other ranks."""
    return f"{type(problem).__name__}: {problem}"


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it returned, and the exception that it raised: one of the two is None."""
    try:
        return action(), None
    except Exception as problem:
        return None, problem


def failure(problem: Exception, doing: Doing, path: str, rank: int) -> CheckpointError:
    """The error of every rank for what `rank` raised while it wrote or read a checkpoint."""
    if isinstance(problem, CommittedError):
        return problem
    kind, why = CheckpointError, sentence_of(problem)
    if isinstance(problem, CheckpointError):
        kind, why = type(problem), str(problem)
    rest = ". What was there before is untouched." if doing == "write" else ""
    return kind(f"Rank {rank} could not {doing} the checkpoint {path!r}: {why}{rest}", rank=rank)


@contextmanager
def raised_together(collective: Collective, doing: Doing, path: str) -> Iterator[None]:
    """Context that raises on every rank, as a CheckpointError, the first exception that any rank raises in it.

    Ranks: all. Cost: one small all-reduce if none raises.
    """
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    if not collective.reduce_boolean_decision(problem is None):
        own = None if problem is None else failure(problem, doing, path, collective.rank)
        raise next(error for error in collective.all_gather_object(own) if error is not None) from problem


def read_by_rank_zero(collective: Collective, path: str, read: Callable[[], T]) -> T:
    """What `read` returns on rank 0, on every rank. Ranks: all. Raises: CheckpointError on every rank, if it raised."""
    found, problem = attempt(read) if collective.rank == 0 else (None, None)
    error = None if problem is None else failure(problem, "read", path, 0)
    found, error = collective.broadcast_object((found, error))
    if error is not None:
        raise error from problem
    return cast(T, found)
