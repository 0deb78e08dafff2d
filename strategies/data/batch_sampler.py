"""The source of indices that a loader's copy reads instead of the user's: the user's, cut to this rank's share.

A `DataLoader` reads a batch sampler, or a sampler where it does not make batches. `index_source` finds which,
and what its items are; the copy gets an `IndexSource` in that place and is the user's own loader in everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, final

from torch.utils.data import BatchSampler, DataLoader

from fabric.strategies.data.content import is_torchs
from fabric.strategies.data.epochs import Epoch, Order, Position
from fabric.strategies.data.partition import BatchCut, Cut, LeaveOut, SampleCut, TurnCut
from fabric.strategies.data.seeded_dataset import with_seed
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
        reader: int | None = None,
    ) -> None:
        """`reader`: who loads the batches; each then carries a seed of its own for it: see `SeededDataset`."""
        self.items, self._replaced = items, replaced
        self.cut, self._order, self._leave_out = cut, order, leave_out
        self._reads, self._eager, self._reader = cut.growing(chunks), eager, reader
        self.read = False
        """Whether a loader has asked for indices."""

    def __iter__(self) -> Iterator[Any]:
        self.read = True
        epoch = self._order.begin()
        items = epoch.draw(self.items, self._reads, eager=self._eager)
        return self._parts(epoch, items, epoch.begun_at)

    def __len__(self) -> int:
        return self.cut.length(len(self.items))  # type: ignore[arg-type]

    def _parts(self, epoch: Epoch, items: Iterator[Any], begun_at: Position) -> Iterator[Any]:
        """The batches from where the epoch begins. Of what comes before, nothing but indices is drawn."""
        items = self.cut.skip(items, begun_at.start) if begun_at.start else items
        parts, end = self.cut(items, self._leave_out), begun_at.start
        for part in islice(parts, begun_at.batches):
            end = begun_at.start + part.end
        if end != max(begun_at.samples, begun_at.start):
            raise ValueError(
                f"The checkpoint stands after {begun_at.samples} samples of the epoch in {begun_at.batches} batches a "
                f"rank; here they have {end}. Make the loader as it was, or begin an epoch by `set_epoch`."
            )
        for part in parts:
            end = begun_at.start + part.end
            epoch.fetched.append((end, part.is_unequal))
            reader = self._reader
            yield part.batch if reader is None else with_seed(part.batch, self._order.seed_of(epoch, end, reader))

    def __getattr__(self, name: str) -> Any:
        # The sampler's own position is ahead of the loader's by a chunk: a stateful loader counts batches instead.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._replaced, name)


def index_source(
    loader: DataLoader[Any], share: Share, uneven: bool, order: Order, leave_out: LeaveOut, *, reader: int | None
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
    # One rank alone reads a sampler of the user's no further than the step, as plain PyTorch does.
    chunks = MAX_CHUNKS if share.count > 1 or is_torchs(items) else 1
    return name, IndexSource(replaced, items, cut, order, leave_out, chunks=chunks, eager=eager, reader=reader)
