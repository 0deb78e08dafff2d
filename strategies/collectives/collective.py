"""The role of a collective: how the ranks of a world talk.

Nothing else in the code calls a collective of torch. Shapes follow one law for every size, one rank included:
`(*S)` on each rank becomes `(W, *S)` when gathered, W the number of ranks.

Every method is called by all ranks of the collective, in the same order, unless it says otherwise. What the caller
passed is left as it was, but for `fill`; results are new tensors, but for `broadcast`, which gives rank `src` its own
back. Gradients stop here. Tensors are dense, of any dtype that `dtypes.py` allows for the operation, on the
collective's device or on the CPU: small decisions always travel there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max", "product"]

_REDUCE_OPS = get_args(ReduceOp)


class CollectiveError(RuntimeError):
    """A collective could not be completed. Carries the rank that noticed, and the cause."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def check_reduce_op(op: str) -> None:
    """Raise ValueError when `op` names no reduction."""
    if op not in _REDUCE_OPS:
        raise ValueError(f"`{op!r}` names no reduction. Write one of {', '.join(map(repr, _REDUCE_OPS))}.")


def check_peer(operation: str, argument: str, peer: int, size: int, *, me: int | None = None) -> None:
    """Raise ValueError when `peer` is no rank to talk to: outside the collective, or this rank itself (`me`)."""
    if not 0 <= peer < size:
        raise ValueError(
            f"`{operation}({argument}={peer})` in a collective of {size}: ranks count from 0 to {size - 1}."
        )
    if peer == me:
        raise ValueError(f"`{operation}({argument}={peer})` on rank {me} itself. Name another rank.")


def check_slices(operation: str, tensor: Tensor, size: int) -> None:
    """Raise ValueError when `tensor` does not hold one slice for each rank."""
    if tensor.ndim == 0 or tensor.shape[0] != size:
        raise ValueError(
            f"`{operation}` of a tensor of shape {tuple(tensor.shape)} over {size} ranks: its first dimension holds "
            f"one slice for each rank. Pass a tensor of shape ({size}, ...)."
        )


def check_split(ranks: Sequence[int], size: int, *, is_part: bool) -> None:
    """Raise ValueError when `ranks` does not name some ranks of a whole, each once and in ascending order."""
    if is_part:
        raise ValueError(
            f"`split({list(ranks)})` of a collective that came from `split` itself: a part is not split again. "
            "Split the whole one, naming its ranks."
        )
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(
            f"`split({list(ranks)})` of a collective of {size}: name at least one rank, each once, in ascending order, "
            f"from 0 to {size - 1}."
        )


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
        """Give every rank the tensor of rank `src`. Shapes and dtypes agree on all ranks; rank `src` gets its own."""

    def fill(self, tensors: Sequence[Tensor], sources: Sequence[int]) -> None:
        """Overwrite the i-th tensor with that of rank `sources[i]`. Shapes and dtypes agree on all ranks.

        Past autograd, which is not told that what it may have saved is overwritten. Whoever can sends all at once.
        """
        for tensor, src in zip(tensors, sources, strict=True):
            received = self.broadcast(tensor.detach(), src)
            if src != self.rank:
                tensor.data.copy_(received)

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Give every rank the elementwise reduction of all ranks' tensors: `(*S)` -> `(*S)`.

        The dtype is kept, with one exception: the mean of integers and booleans is computed and given in the
        default floating-point dtype. See `dtypes.py` for the dtypes that an `op` refuses.
        """

    def start_all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Callable[[], Tensor]:
        """`all_reduce` that goes on by itself where the backend can. What is given out waits, and gives the result.

        Ranks: all start it. Each calls what is given out at most once, when it likes.
        """
        reduced = self.all_reduce(tensor, op)
        return lambda: reduced

    def add_numbers(self, first: float, second: float) -> tuple[float, float]:
        """Give every rank the sums, in float64, of all ranks' first and of all ranks' second numbers."""
        sums = self.all_reduce(torch.tensor((first, second), dtype=torch.float64, device="cpu")).tolist()
        return sums[0], sums[1]

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Give every rank the tensors of all ranks, stacked in rank order: `(*S)` -> `(W, *S)`."""

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """`all_gather` that goes on by itself where the backend can. What is given out waits, and gives the result.

        Ranks: all start it. Each calls what is given out once, when it likes, and leaves `tensor` as it is until then.
        """
        gathered = self.all_gather(tensor)
        return lambda: gathered

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce slice `r` of all ranks' tensors and give it to rank `r`: `(W, *S)` -> `(*S)`.

        Dtypes: as `all_reduce`.
        """

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
        """Give every rank the picklable object of rank `src`; rank `src` gets its own back.

        Tensors anywhere inside travel as tensors, not pickled, and arrive on the receiver's device of the same type.
        Raises: CollectiveError: rank `src` could not pickle it (on every rank), or the ranks called different things.
        """

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Give every rank copies of the picklable objects of all ranks, in rank order.

        Raises: CollectiveError: a rank could not pickle its own (on every rank), or the ranks called different things.
        """

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Collective | None:
        """Give the collective of some ranks (counted in this one), already set up; None on a rank outside it.

        Ranks: all ranks of this collective call it, also those outside, with the same `ranks`, in ascending order.
        It is made once: the same ranks give the same object, which lives until this collective's `teardown`. It is not
        split again.
        """

    def reduce_boolean_decision(self, decision: bool, *, require_all: bool = True) -> bool:
        """Decide together: true where all ranks (`require_all=False`: any rank) said true."""
        return bool(self.all_reduce(torch.tensor(decision, device="cpu"), "min" if require_all else "max"))

    @abstractmethod
    def store(self) -> Store | None:
        """The key-value store of these ranks, for messages outside of any collective; None if this is all of them.

        Ranks: each may call it alone. Keys are this collective's own.
        """
