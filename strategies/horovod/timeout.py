"""A timeout for calls of Horovod, which itself waits forever for a rank that does not arrive.

A rank that has waited a while writes its call into the store. So a rank that times out can name the missing ranks, and
ranks that call different operations, which Horovod never matches, can raise an error.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from torch import Tensor

from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.tensors.packing import Spec

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

SHORT_SECONDS, LONG_SECONDS = 50e-6, 1e-3
"""Poll intervals: at first, and after a while. A cycle of Horovod takes a millisecond."""
LOOK_SECONDS = 0.5
"""How often a waiting rank reads the store; at least four times before the timeout. Unmeasured."""
OPERATIONS = ("barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@final
class Watch:
    """Waits for calls of rank `rank` of `size`. `store`: used by these ranks only."""

    def __init__(self, store: "Store", rank: int, size: int, timeout_seconds: float) -> None:
        self._store, self._rank, self._size, self._timeout_seconds = store, rank, size, timeout_seconds

    def wait(self, is_done: Callable[[], bool], operation: str, tensor: Tensor, number: int) -> None:
        """Return once `is_done()` is true, for `operation` of a tensor, this rank's call number `number`.

        Raises: CollectiveError: ranks are missing at the timeout, or a rank waits in another operation with the same
        number.
        """
        start, pause_seconds = time.monotonic(), SHORT_SECONDS
        every_seconds = look_seconds = min(LOOK_SECONDS, self._timeout_seconds / 4)
        while not is_done():
            waited_seconds = time.monotonic() - start
            if waited_seconds > look_seconds:
                self._look_around(operation, tensor, number)
                pause_seconds, look_seconds = LONG_SECONDS, look_seconds + every_seconds
            if waited_seconds > self._timeout_seconds:
                raise self._late(operation, tensor, number)
            time.sleep(pause_seconds)

    def _look_around(self, operation: str, tensor: Tensor, number: int) -> None:
        """Write this rank's call into the store. Raises CollectiveError if another rank waits in another operation."""
        self._store.set(f"{self._rank}", str(number))
        self._store.set(f"{number}/{operation}", str(self._rank))
        for other in OPERATIONS:
            if other != operation and self._store.check([f"{number}/{other}"]):
                rank = self._store.get(f"{number}/{other}").decode()
                raise CollectiveError(
                    f"`{operation}` of a tensor {Spec.of(tensor)} on rank {self._rank} of {self._size} is its call "
                    f"{number}, and that of rank {rank} is `{other}`. Make all ranks call the same, in the same order.",
                    rank=self._rank,
                )

    def _late(self, operation: str, tensor: Tensor, number: int) -> CollectiveError:
        """The error of a timeout: it names the ranks that have arrived and those that have not."""
        says = [self._store.get(f"{rank}") if self._store.check([f"{rank}"]) else b"" for rank in range(self._size)]
        here = [rank for rank, value in enumerate(says) if value == str(number).encode()]
        missing = [rank for rank in range(self._size) if rank not in here]
        return CollectiveError(
            f"`{operation}` of a tensor {Spec.of(tensor)} on rank {self._rank} of {self._size}, its call {number}, "
            f"waited {self._timeout_seconds:g} s: {_names(here)} arrived, {_names(missing)} did not arrive. Check "
            "what the missing ranks do instead, or pass a larger `timeout_seconds`.",
            rank=self._rank,
            lost=missing,
        )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
