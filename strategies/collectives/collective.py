"""The interface of a collective: communication between the ranks of a world.

Nothing else in the code calls a collective of torch. One shape rule holds for every number of ranks, including one:
`(*S)` on each rank becomes `(W, *S)` when gathered, W the number of ranks.

Every method is called by all ranks of the collective, in the same order, unless it says otherwise. Arguments are not
changed, except by `fill`; results are new tensors, except that `broadcast` returns the argument on rank `src`. Nothing
is differentiable. Tensors are dense, of any dtype that `dtypes.py` allows for the operation, on the collective's device
or on the CPU.
"""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args
from weakref import WeakSet

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store


ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max", "product"]

_REDUCE_OPS = get_args(ReduceOp)

HOST_DEVICES = ("cpu", "xla")
"""Device types with which small numbers are sent as CPU tensors. With others they stay on the device, so that the host
does not wait for it. XLA's graphs must be equal on all ranks, and would contain such numbers."""


class CollectiveError(RuntimeError):
    """A collective could not be completed. Has the rank that noticed, and the cause.

    `lost`: the ranks known to have ended, or not to have arrived, while others called it. `lost_peer`: whether only
    other ranks are lost, so that this rank's error is a symptom and not the cause.
    """

    # -1: until pickle sets it
    def __init__(self, message: str, *, rank: int = -1, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rank, self.lost, self.lost_peer = rank, lost, bool(lost) and rank not in lost


def check_reduce_op(op: str) -> None:
    """Raise ValueError if `op` is not a reduction."""
    if op not in _REDUCE_OPS:
        raise ValueError(f"`{op!r}` is not a reduction. Write one of {', '.join(map(repr, _REDUCE_OPS))}.")


def check_peer(operation: str, argument: str, peer: int, size: int, *, me: int | None = None) -> None:
    """Raise ValueError if `peer` is not another rank: outside the collective, or this rank itself (`me`)."""
    if not 0 <= peer < size:
        raise ValueError(
            f"`{operation}({argument}={peer})` in a collective of {size}: ranks count from 0 to {size - 1}."
        )
    if peer == me:
        raise ValueError(f"`{operation}({argument}={peer})` on rank {me} itself. Name another rank.")


def check_slices(operation: str, tensor: Tensor, size: int) -> None:
    """Raise ValueError if `tensor` does not hold one slice for each rank."""
    if tensor.ndim == 0 or tensor.shape[0] != size:
        raise ValueError(
            f"`{operation}` of a tensor of shape {tuple(tensor.shape)} over {size} ranks: its first dimension holds "
            f"one slice for each rank. Pass a tensor of shape ({size}, ...)."
        )


def check_split(ranks: Sequence[int], size: int, *, is_part: bool) -> None:
    """Raise ValueError unless `ranks` names ranks of the collective, each once and in ascending order."""
    if is_part:
        raise ValueError(
            f"`split({list(ranks)})` of a collective that came from `split` itself: a part cannot be split again. "
            "Split the original collective, naming its ranks."
        )
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(
            f"`split({list(ranks)})` of a collective of {size}: name at least one rank, each once, in ascending order, "
            f"from 0 to {size - 1}."
        )


class Collective(ABC):
    """Communication between the ranks of a world, or some of them."""

    device: torch.device | None = None
    """The device of this rank; None: the current one, which each thread of the program has of its own."""
    progress: Callable[[], str] = staticmethod(lambda: "")
    """How far the loop of this rank is, for errors: `after 6 steps`."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process in the collective, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @property
    def process_group(self) -> "ProcessGroup | None":
        """Torch's process group of these ranks, for classes of torch that take one; None: there is none."""
        return None

    @abstractmethod
    def setup(self) -> None:
        """Connect to the other ranks. Called once, before anything else."""

    @abstractmethod
    def teardown(self) -> None:
        """Undo `setup`. Called by each rank when it is done; a second call does nothing."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once all ranks have called it."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return the tensor of rank `src`. Shapes and dtypes are equal on all ranks; rank `src` gets its own tensor."""

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor with that of rank 0. Shapes and dtypes are equal on all ranks.

        Bypasses autograd, which does not notice that saved tensors are overwritten. A backend may send all at once.
        """
        for tensor in tensors:
            received = self.broadcast(tensor.detach())
            if self.rank != 0:
                tensor.data.copy_(received)

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the elementwise reduction of all ranks' tensors: `(*S)` -> `(*S)`.

        The dtype is kept, with one exception: the mean of integers and booleans is computed and returned in the default
        floating-point dtype. See `dtypes.py` for the dtypes that an `op` refuses.
        """

    def start_all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Callable[[], Tensor]:
        """Asynchronous `all_reduce`, if the backend supports it. The returned function waits, and returns the result.

        Ranks: all start it. Each calls the returned function at most once, at any time.
        """
        reduced = self.all_reduce(tensor, op)
        return lambda: reduced

    def add_number(self, number: float) -> float:
        """Give every rank the sum, in float64, of all ranks' numbers."""
        return self.all_reduce(torch.tensor(number, dtype=torch.float64, device="cpu")).item()

    def add_number_later(self, number: float, then: Callable[[float], None]) -> None:
        """Asynchronous `add_number`, if the backend supports it: `then` receives the sum before the next message
        between hosts."""
        then(self.add_number(number))

    def start_add_numbers(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Asynchronous sums, in float64, of all ranks' numbers. Otherwise as `start_all_reduce`."""
        finish = self.start_all_reduce(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        return lambda: finish().tolist()

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in rank order: `(*S)` -> `(W, *S)`."""

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Asynchronous `all_gather`, if the backend supports it. The returned function waits, and returns the result.

        Ranks: all start it. Each calls the returned function once, at any time, and does not change `tensor` before.
        """
        gathered = self.all_gather(tensor)
        return lambda: gathered

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce slice `r` of all ranks' tensors, and return it on rank `r`: `(W, *S)` -> `(*S)`.

        Dtypes: as `all_reduce`.
        """

    @abstractmethod
    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send slice `r` to rank `r`; slice `r` of the result is from rank `r`: `(W, *S)` -> `(W, *S)`."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None:
        """Send to rank `dst`, which calls `recv`. Only the two ranks take part."""

    @abstractmethod
    def recv(self, like: Tensor, src: int) -> Tensor:
        """Receive from rank `src` a tensor of the shape, dtype and device of `like`. Only the two ranks take part."""

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the picklable object of rank `src`; rank `src` gets its own object.

        Tensors anywhere inside are sent as tensors, not pickled, and arrive on the receiver's device of the same type.
        Raises: CollectiveError: rank `src` could not pickle it (on every rank), or the ranks made different calls.
        """

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return copies of the picklable objects of all ranks, in rank order.

        Raises: CollectiveError: a rank could not pickle its object (on every rank), or the ranks made different calls.
        """

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> "Collective | None":
        """The collective of some ranks (numbered in this one), already set up; None on other ranks.

        Ranks: all ranks of this collective call it, with the same `ranks`, in ascending order.
        The same ranks always return the same object, which exists until this collective's `teardown`. It cannot be
        split again.
        """

    def for_gradients(self) -> "Collective":
        """A collective of the same ranks for gradients. Where the backend aborts if ranks make different calls, calls
        of the two collectives are not matched with each other.

        The same object each time, which exists until `teardown`.
        """
        return self

    def reduce_boolean_decision(self, decision: bool, *, require_all: bool = True) -> bool:
        """Decide together: True if all ranks (`require_all=False`: any rank) pass True."""
        return bool(self.all_reduce(torch.tensor(decision, device="cpu"), "min" if require_all else "max"))

    @abstractmethod
    def store(self) -> "Store | None":
        """The key-value store of these ranks, for messages outside of collectives; None if there are no others.

        Ranks: each may call it alone. Keys are private to this collective.
        """


# Note [Collectives in forked processes]
# A process that a rank forks, such as a worker of a `DataLoader`, is not a rank: it has copies of the rank's sockets,
# but not the threads that serve them. A collective would wait there for ever, so it drops its connection, and raises.
_CONNECTED: WeakSet[Any] = WeakSet()


def forget_in_forks(collective: Any) -> None:
    """Call `collective.forget()` in each process that this one forks from now on, as long as the collective exists."""
    _CONNECTED.add(collective)


def in_a_fork(operation: str, rank: int) -> str:
    """The text of the error that a collective raises in a forked process."""
    return (
        f"`{operation}` in a process that rank {rank} has forked (a worker of a `DataLoader`, `multiprocessing`, "
        "`os.fork`): it is not a rank, and cannot reach the other ranks. Call collectives in the process of the rank, "
        "and pass a dataset their results, or `fabric.global_rank`."
    )


def _forget() -> None:
    for each in list(_CONNECTED):
        each.forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
