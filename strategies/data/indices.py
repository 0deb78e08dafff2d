"""The source of indices that a loader's copy reads instead of the user's: the user's, cut to this rank's share.

A `DataLoader` reads a batch sampler, or a sampler where it does not make batches. `source_of` finds which, and what
its items are; the copy gets an `IndexSource` in that place and is the user's own loader in everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from torch.utils.data import BatchSampler, DataLoader

from fabric.strategies.data.cut import BatchCut, Cut, LeaveOut, SampleCut, TurnCut
from fabric.strategies.data.order import Order
from fabric.strategies.data.share import Share

MAX_CHUNKS = 64


@final
class IndexSource:
    """One rank's share of the items that a sampler yields. Answers for the sampler in whatever else it is asked."""

    def __init__(
        self,
        replaced: Iterable[Any],
        items: Iterable[Any],
        cut: Cut,
        order: Order,
        leave_out: LeaveOut,
        *,
        chunks: int,
        eager: bool,
    ) -> None:
        self.items, self._replaced = items, replaced
        self._cut, self._order, self._leave_out = cut, order, leave_out
        self._reads, self._eager = cut.growing(chunks), eager
        self.read = False
        """Whether a loader has asked for indices."""

    def __iter__(self) -> Iterator[Any]:
        self.read = True
        items = self._order.begin().draw(self.items, self._reads, eager=self._eager)
        return self._cut(items, self._leave_out)

    def __len__(self) -> int:
        return self._cut.length(len(self.items))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._replaced, name)


def items_of(loader: DataLoader[Any]) -> tuple[str, Iterable[Any]]:
    """The attribute from which a map-style loader reads, and whose items are to be shared."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return "sampler", loader.sampler
    if loader.batch_size is not None or type(batch_sampler) is BatchSampler:
        return "batch_sampler", batch_sampler.sampler  # type: ignore[union-attr]
    return "batch_sampler", batch_sampler


def cut_of(loader: DataLoader[Any], share: Share, uneven: bool) -> Cut:
    """How the items of a map-style loader are shared."""
    batches = loader.batch_sampler
    if batches is None:
        return TurnCut(share=share, uneven=uneven)
    if loader.batch_size is not None or type(batches) is BatchSampler:
        return SampleCut(share=share, uneven=uneven, batch_size=batches.batch_size, drop_last=batches.drop_last)  # type: ignore[union-attr]
    return BatchCut(share=share, uneven=uneven)


def index_source(
    loader: DataLoader[Any], cut: Cut, order: Order, leave_out: Callable[[int], None]
) -> tuple[str, IndexSource]:
    """The attribute to exchange on the loader's copy, and what to put there."""
    name, items = items_of(loader)
    replaced = getattr(loader, name)
    eager = type(replaced) is not BatchSampler  # torch's asks its sampler late, after the seed of the workers is drawn
    return name, IndexSource(replaced, items, cut, order, leave_out, chunks=MAX_CHUNKS, eager=eager)
