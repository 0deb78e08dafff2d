"""The role of a collective: how the ranks of a world talk.

Nothing else in the code calls a collective of torch. Shapes follow one law for every size, one rank included:
`(*S)` on each rank becomes `(W, *S)` when gathered, W the number of ranks.

Every method is called by all ranks of the collective, in the same order, unless it says otherwise, and returns a
new tensor: what the caller passed is left as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max", "product"]


class CollectiveError(RuntimeError):
    """A collective could not be completed. Carries the rank that noticed, and the cause."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def check_reduce_op(op: str) -> None:
    """Raise ValueError when `op` names no reduction."""
    if op not in get_args(ReduceOp):
        raise ValueError(f"`{op!r}` names no reduction. Write one of {', '.join(map(repr, get_args(ReduceOp)))}.")


class Collective(ABC):
    """The ranks of a world, or some of them, able to talk."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's place in the collective, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks take part."""

    @abstractmethod
    def setup(self) -> None:
        """Meet the other ranks. Called once, before anything else."""

    @abstractmethod
    def teardown(self) -> None:
        """Give back what `setup` took. Called by each rank when it is done; a second call does nothing."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once all ranks have called it."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Give every rank the tensor of rank `src`. Shapes and dtypes agree on all ranks."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Give every rank the elementwise reduction of all ranks' tensors: `(*S)` -> `(*S)`.

        The dtype is kept, with one exception: the mean of integers and booleans is computed and given in the
        default floating-point dtype.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Give every rank the tensors of all ranks, stacked in rank order: `(*S)` -> `(W, *S)`."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce slice `r` of all ranks' tensors and give it to rank `r`: `(W, *S)` -> `(*S)`."""

    @abstractmethod
    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send slice `r` to rank `r`; slice `r` of the result came from rank `r`: `(W, *S)` -> `(W, *S)`."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None:
        """Send to rank `dst`, which calls `recv`. Only the two ranks take part."""

    @abstractmethod
    def recv(self, like: Tensor, src: int) -> Tensor:
        """Receive from rank `src` a tensor of the shape, dtype and device of `like`. Only the two ranks take part."""

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Give every rank the picklable object of rank `src`; rank `src` gets its own back."""

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Give every rank the picklable objects of all ranks, in rank order."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Collective | None:
        """Make a collective of some ranks (counted in this one), already set up; None on a rank outside it.

        Ranks: all ranks of this collective call it, also those outside `ranks`. Ranks keep the order of `ranks`.
        """

    @abstractmethod
    def reduce_boolean_decision(self, decision: bool, *, require_all: bool = True) -> bool:
        """Decide together: true where all ranks (`require_all=False`: any rank) said true."""
