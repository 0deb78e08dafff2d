"""One rank runs a block first (a download, a cache), the others after it; if it fails, all fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective, CollectiveError


@contextmanager
def rank_zero_first(collective: Collective, world: World, *, local: bool = False) -> Iterator[None]:
    """Run the block on rank 0 (`local`: of each node), and on the other ranks once that has ended.

    Ranks: all of `collective`, which covers the whole `world`. Cost: one message per rank; no process group is created.
    The others wait as long as the collective's timeout allows.
    Raises: the block's exception, on the rank where it was raised; CollectiveError: on all others, at once, with that
    cause.
    """
    goes_first = (world.local_rank if local else world.rank) == 0
    failure: str | None = None
    if goes_first:
        try:
            yield
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the others must not wait for ever
            failure = f"{type(error).__name__}: {error}"
            collective.all_gather_object(failure)
            raise
    failures = collective.all_gather_object(None)
    for rank, cause in enumerate(failures):
        if cause is not None:
            raise CollectiveError(
                f"Rank {rank} failed in the block of `rank_zero_first` that it runs before the others: {cause}",
                rank=collective.rank,
            )
    if not goes_first:
        yield
