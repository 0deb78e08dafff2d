"""The source of indices that a loader's copy reads instead of the user's: the user's, cut to this rank's share.

A `DataLoader` reads a batch sampler, or a sampler where it does not make batches. `index_source` finds which,
and what its items are; the copy gets an `IndexSource` in that place and is the user's own loader in everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

from torch.utils.data import BatchSampler, DataLoader

from fabric.strategies.data.epochs import Order
from fabric.strategies.data.partition import BatchCut, Cut, LeaveOut, SampleCut, TurnCut
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
        self.cut, self._order, self._leave_out = cut, order, leave_out
        self._reads, self._eager = cut.growing(chunks), eager
        self.read = False
        """Whether a loader has asked for indices."""

    def __iter__(self) -> Iterator[Any]:
        self.read = True
        items = self._order.begin().draw(self.items, self._reads, eager=self._eager)
        return self.cut(items, self._leave_out)

    def __len__(self) -> int:
        return self.cut.length(len(self.items))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # The sampler's own position is ahead of the loader's by a chunk: a stateful loader counts batches instead.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._replaced, name)


def index_source(
    loader: DataLoader[Any], share: Share, uneven: bool, order: Order, leave_out: LeaveOut
) -> tuple[str, IndexSource]:
    """The attribute to exchange on a map-style loader's copy, and what to put there.

    Samples that torch's own `BatchSampler` puts into batches are shared one by one; a batch sampler of the user's
    has its reasons for each batch, so its batches are shared whole; without one, whatever the sampler yields.
    """
    name, items = "sampler", loader.sampler
    cut: Cut = TurnCut(share=share, uneven=uneven)
    batches = loader.batch_sampler
    if batches is not None:
        name, items, cut = "batch_sampler", batches, BatchCut(share=share, uneven=uneven)
    if isinstance(batches, BatchSampler) and (loader.batch_size is not None or type(batches) is BatchSampler):
        items = batches.sampler
        cut = SampleCut(share=share, uneven=uneven, batch_size=batches.batch_size, drop_last=batches.drop_last)
    replaced = getattr(loader, name)
    eager = type(replaced) is not BatchSampler  # torch's asks its sampler late, after the seed of the workers is drawn
    return name, IndexSource(replaced, items, cut, order, leave_out, chunks=MAX_CHUNKS, eager=eager)
