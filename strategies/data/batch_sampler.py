"""The sampler of a prepared loader: yields this rank's share of what the user's sampler yields.

A `DataLoader` reads its batch sampler, or its sampler if it does no batching. `index_source` finds out which of them
and what its items are. In a shallow copy of the loader an `IndexSource` replaces it; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, final

from torch.utils.data import BatchSampler, DataLoader

from fabric.strategies.data.content import is_torchs
from fabric.strategies.data.epochs import Epoch, Order, Position
from fabric.strategies.data.joined import of_all_shares
from fabric.strategies.data.partition import BatchCut, Cut, RoundRobinCut, SampleCut
from fabric.strategies.data.share import Joined, Share
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
        is_seeded: bool = False,
    ) -> None:
        """`most_steps`: how many may be drawn at a time. `eager`: `iter` is called on the items when the iteration
        begins. `is_seeded`: each batch has a seed of its own: `SeededDataset`."""
        self.items, self._replaced = items, replaced
        self._cut, self._order = cut, order
        self._most_steps, self._eager, self._is_seeded = most_steps, eager, is_seeded
        self.joined: Joined | None = None
        """For a process that reads in place of several ranks."""
        self.read = False
        """Whether a loader has asked for indices."""

    def __iter__(self) -> Iterator[Any]:
        self.read = True
        epoch, cut = self._order.begin(), self.cut
        items = epoch.draw(self.items, cut.reads, most_steps=self._most_steps, eager=self._eager)
        return chain.from_iterable(self._batches(epoch, items, cut, epoch.begun_at))

    def __len__(self) -> int:
        return self.cut.length(len(self.items))  # type: ignore[arg-type]

    @property
    def cut(self) -> Cut:
        """How an epoch that begins now is divided: a loop may change `batch_size` of the batch sampler meanwhile."""
        cut, batches = self._cut, self._replaced
        if isinstance(cut, SampleCut) and isinstance(batches, BatchSampler):
            cut = replace(cut, batch_size=batches.batch_size, drop_last=batches.drop_last)
        return of_all_shares(cut, self.joined)

    def _batches(self, epoch: Epoch, items: Iterator[Any], cut: Cut, begun_at: Position) -> Iterator[Iterable[Any]]:
        """The batches after `begun_at`, some at a time. Of those before, indices are drawn and no sample is loaded."""
        items = cut.skip(items, begun_at.start) if begun_at.start else items
        parts, end = cut(items), begun_at.start
        for part in islice(parts, begun_at.batches):
            end = begun_at.start + part.end
        if end != max(begun_at.samples, begun_at.start):
            raise ValueError(
                f"The checkpoint was taken after {begun_at.samples} samples of the epoch in {begun_at.batches} batches "
                f"per rank; here these batches have {end}. Construct the same loader, or start a new epoch with "
                "`set_epoch`."
            )
        ahead = list(islice(parts, epoch.num_ahead))
        if not self._order.is_shared:
            epoch.streams.release()
        parts, num_steps = chain(ahead, parts), 1
        while group := list(islice(parts, num_steps)):
            num_steps = min(2 * num_steps, self._most_steps)
            epoch.fetch(group)
            if self._is_seeded:
                yield (Seeded(part.batch, epoch.seed_of_batch(part.end)) for part in group)
            else:
                yield [part.batch for part in group]

    def __getattr__(self, name: str) -> Any:
        # Indices are read ahead, so the sampler's state is ahead of the loop: a stateful loader counts batches instead.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._replaced, name)


def index_source(
    loader: DataLoader[Any], share: Share, uneven: bool, order: Order, *, is_seeded: bool
) -> tuple[str, IndexSource]:
    """The attribute to replace on the copy of a map-style loader (`sampler`, `batch_sampler`), and its new value."""
    name, items = indices_of(loader)
    replaced = getattr(loader, name)
    cut: Cut = RoundRobinCut(share=share, uneven=uneven)
    if isinstance(replaced, BatchSampler) and items is replaced.sampler:
        cut = SampleCut(share=share, uneven=uneven, batch_size=replaced.batch_size, drop_last=replaced.drop_last)
    elif name == "batch_sampler":
        cut = BatchCut(share=share, uneven=uneven)
    # In one process a sampler that may draw later is not read ahead of the loop, as in plain PyTorch.
    most_steps = MOST_STEPS if order.is_shared or (is_torchs(items) and not order.own) else 1
    eager = type(replaced) is not BatchSampler  # which iterates its sampler after the seed of the workers is drawn
    source = IndexSource(replaced, items, cut, order, most_steps=most_steps, eager=eager, is_seeded=is_seeded)
    return name, source


def indices_of(loader: DataLoader[Any]) -> tuple[str, Iterable[Any]]:
    """The attribute from which a map-style loader reads its indices, and the items that are distributed over ranks.

    With torch's own `BatchSampler` they are single samples. The batches of a custom batch sampler are distributed
    whole, because it decides what is in a batch. Without batching, the items of the sampler are.
    """
    batches = loader.batch_sampler
    if batches is None:
        return "sampler", loader.sampler
    if isinstance(batches, BatchSampler) and (loader.batch_size is not None or type(batches) is BatchSampler):
        return "batch_sampler", batches.sampler
    return "batch_sampler", batches
