"""The sampler of a prepared loader: yields this rank's share of what the user's sampler yields.

A `DataLoader` reads its batch sampler, or its sampler if it does no batching. `index_source` finds out which of them
and what its items are. In a shallow copy of the loader an `IndexSource` replaces it; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, final

from torch.utils.data import BatchSampler, DataLoader

from fabric.strategies.data.content import is_torchs
from fabric.strategies.data.epochs import Epoch, Order, Part, Position
from fabric.strategies.data.partition import BatchCut, Cut, RoundRobinCut, SampleCut
from fabric.strategies.data.share import Share
from fabric.strategies.data.workers import Seeded

MOST_STEPS = 64


@final
class IndexSource:
    """One rank's share of the items that a sampler yields. Delegates other attributes to the sampler."""

    def __init__(
        self,
        replaced: Iterable[Any],
        items: Iterable[Any],
        cut: Cut,
        order: Order,
        *,
        most_steps: int,
        eager: bool = False,
        reader: int | None = None,
    ) -> None:
        """`most_steps`: how many may be drawn at a time. `eager`: `iter` is called on the items when the iteration
        begins. `reader`: index of the share that loads the batches; gives each a seed of its own: `SeededDataset`."""
        self.items, self._replaced = items, replaced
        self.cut, self._order = cut, order
        self._most_steps, self._eager, self._reader = most_steps, eager, reader
        self.read = False
        """Whether a loader has asked for indices."""

    def __iter__(self) -> Iterator[Any]:
        self.read = True
        epoch = self._order.begin()
        items = epoch.draw(self.items, self.cut.reads, most_steps=self._most_steps, eager=self._eager)
        return chain.from_iterable(self._batches(epoch, items, epoch.begun_at))

    def __len__(self) -> int:
        return self.cut.length(len(self.items))  # type: ignore[arg-type]

    def _batches(self, epoch: Epoch, items: Iterator[Any], begun_at: Position) -> Iterator[Iterable[Any]]:
        """The batches after `begun_at`, some at a time. Of those before, indices are drawn and no sample is loaded."""
        items = self.cut.skip(items, begun_at.start) if begun_at.start else items
        parts, end = self.cut(items), begun_at.start
        for part in islice(parts, begun_at.batches):
            end = begun_at.start + part.end
        if end != max(begun_at.samples, begun_at.start):
            raise ValueError(
                f"The checkpoint was taken after {begun_at.samples} samples of the epoch in {begun_at.batches} batches "
                f"per rank; here these batches have {end}. Construct the same loader, or start a new epoch with "
                "`set_epoch`."
            )
        num_steps = 1
        while group := list(islice(parts, num_steps)):
            num_steps = min(2 * num_steps, self._most_steps)
            epoch.fetch(group)
            yield [part.batch for part in group] if self._reader is None else self._seeded(epoch, group, self._reader)

    def _seeded(self, epoch: Epoch, parts: list[Part], reader: int) -> Iterator[Any]:
        for part in parts:
            yield Seeded(part.batch, self._order.seed_of(epoch, epoch.begun_at.start + part.end, reader))

    def __getattr__(self, name: str) -> Any:
        # Indices are read ahead, so the sampler's state is ahead of the loop: a stateful loader counts batches instead.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._replaced, name)


def index_source(
    loader: DataLoader[Any], share: Share, uneven: bool, order: Order, *, reader: int | None
) -> tuple[str, IndexSource]:
    """The attribute to replace on the copy of a map-style loader (`sampler`, `batch_sampler`), and its new value.

    With torch's own `BatchSampler`, single samples are distributed over ranks. The batches of a custom batch sampler
    are distributed whole, because it decides what is in a batch. Without batching, the items of the sampler are.
    """
    name, items = "sampler", loader.sampler
    cut: Cut = RoundRobinCut(share=share, uneven=uneven)
    batches = loader.batch_sampler
    if batches is not None:
        name, items, cut = "batch_sampler", batches, BatchCut(share=share, uneven=uneven)
    if isinstance(batches, BatchSampler) and (loader.batch_size is not None or type(batches) is BatchSampler):
        items = batches.sampler
        cut = SampleCut(share=share, uneven=uneven, batch_size=batches.batch_size, drop_last=batches.drop_last)
    # On one rank a custom sampler is not read ahead of the loop, as in plain PyTorch.
    most_steps = MOST_STEPS if share.count > 1 or is_torchs(items) else 1
    replaced = getattr(loader, name)
    eager = type(replaced) is not BatchSampler  # which iterates its sampler after the seed of the workers is drawn
    source = IndexSource(replaced, items, cut, order, most_steps=most_steps, eager=eager, reader=reader)
    return name, source
