"""Rank 0 decides, or goes first: its weights and buffers are broadcast, and a block (a download, a cache) runs there
before it runs on the other ranks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.tensors.packing import flat, groups, put_back
from fabric.strategies.tensors.wrapper_subclass import plain_tensors


def broadcast_from_rank_zero(collective: Collective, tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0, in place, small ones packed. Bypasses autograd, as `Collective.fill`.

    Ranks: all call it, with tensors of the same shapes in the same order.
    """
    sent = [
        plain
        for tensor in tensors
        for plain in ((tensor,) if type(tensor) is Tensor else plain_tensors(tensor).values())  # buffers: no call
    ]
    if not sent:  # most models have no buffers, and this is called in every forward
        return
    with torch.no_grad():
        together, alone = groups((each.nbytes for each in sent), (each.dtype for each in sent))
        packed = [[sent[index] for index in indices] for indices in together]
        flats = [flat(members) for members in packed]
        collective.fill([*flats, *(sent[index] for index in alone)])
        if collective.rank != 0:
            for values, members in zip(flats, packed, strict=True):
                put_back(values, members)


def buffers_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    """The current buffers of the modules themselves, not of their submodules. Not to be cached: a forward may
    assign another tensor (https://github.com/pytorch/pytorch/issues/63916)."""
    return list(dict.fromkeys(each for part in parts for each in part._buffers.values() if each is not None))


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
    try:
        if goes_first:
            yield
    except BaseException as error:  # also KeyboardInterrupt and SystemExit: the others must not wait for ever
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        failures = collective.all_gather_object(failure)
    for rank, cause in enumerate(failures):
        if cause is not None:
            raise CollectiveError(
                f"Rank {rank} failed in the block of `rank_zero_first` that it runs before the others: {cause}",
                rank=collective.rank,
            )
    if not goes_first:
        yield
