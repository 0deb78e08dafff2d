"""How one order of items becomes equal shares: every item on one rank, nothing padded, nothing dropped.

Three kinds of items, three cuts. Single samples are cut so that the ranks' batches, laid side by side, are the
batches of one process with a batch `count` times as large. Ready batches go round. Batches of indices go round too,
but can be split. Every cut gives all ranks the same number of batches; where that is impossible `uneven` decides:
True lets the first ranks have one more, False leaves the tail out and reports how many items it had.

Note [The tail of an epoch]
With W ranks and batches of B, an order of n samples ends in a step of fewer than B * W. A step of at least W is
divided evenly. A smaller one takes what it lacks from the step before, which then is smaller than B * W. So each
rank gets a sample at every step, and a step's samples are all its own. Only B = 1 leaves nothing to take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeAlias, final

from fabric.strategies.data.epochs import Reads
from fabric.strategies.data.share import Share

LeaveOut: TypeAlias = Callable[[int], None]
"""Told how many items at the end of an order were left out."""


@dataclass(frozen=True, slots=True)
class Part:
    """One share's batch of a step."""

    batch: Any
    end: int
    """How many samples of the order all ranks have read with this step."""
    is_unequal: bool = False
    """Whether the shares' batches of this step have different numbers of samples."""


@dataclass(frozen=True, kw_only=True)
class Cut(ABC):
    """What one share reads of an order."""

    share: Share
    uneven: bool

    keeps_samples: ClassVar[bool] = True
    """Whether the items of the order are samples, whatever the size of a batch."""

    @property
    @abstractmethod
    def reads(self) -> tuple[int, int]:
        """How many items make the first batch, and how many each further one."""

    @abstractmethod
    def __call__(self, items: Iterator[Any], leave_out: LeaveOut) -> Iterator[Part]:
        """This share's batches."""

    def skip(self, items: Iterator[Any], num_samples: int) -> Iterator[Any]:
        """The items after the first `num_samples` samples of the order."""
        return islice(items, num_samples, None)

    @abstractmethod
    def length(self, num_items: int) -> int:
        """How many batches this share has of so many items."""

    @abstractmethod
    def refuse(self, num_items: int) -> str | None:
        """None where so many items can be shared out; otherwise what is so, and what to write instead."""

    def growing(self, chunks: int) -> Reads:
        """What to draw at a time when reading ahead is cheap: up to `chunks` batches."""
        first, step = self.reads
        return Reads(first=first, step=step, largest=step * chunks)


@final
@dataclass(frozen=True, kw_only=True)
class SampleCut(Cut):
    """Single samples into batches of `batch_size`: see Note [The tail of an epoch]."""

    batch_size: int
    drop_last: bool

    @property
    def step(self) -> int:
        """Samples of all ranks in a whole step."""
        return self.batch_size * self.share.count

    @property
    def ahead(self) -> int:
        """Samples to know of before a step is given: whether the last one will need to take from it."""
        return 0 if self.drop_last or self.share.count == 1 else self.share.count

    @property
    def reads(self) -> tuple[int, int]:
        return self.step + self.ahead, self.step

    def __call__(self, items: Iterator[Any], leave_out: LeaveOut) -> Iterator[Part]:
        held: list[Any] = []
        end, step, needed = 0, self.step, self.step + self.ahead
        mine = slice(self.share.index * self.batch_size, (self.share.index + 1) * self.batch_size)
        while True:
            held += islice(items, needed - len(held))
            if len(held) < needed:
                break
            end += step
            yield Part(held[mine], end)
            del held[:step]
        if not self.drop_last:
            yield from self._tail(held, end + len(held), leave_out)

    def _tail(self, held: list[Any], end: int, leave_out: LeaveOut) -> Iterator[Part]:
        count, rest = self.share.count, max(len(held) - self.step, 0)
        if rest and self.batch_size > 1:
            yield Part(self.share.of(held[:-count]), end - count, len(held) % count > 0)
            yield Part(self.share.of(held[-count:]), end)
            return
        if len(held) >= count:
            yield Part(self.share.of(held[: len(held) - rest]), end - rest, (len(held) - rest) % count > 0)
            held = held[len(held) - rest :]
        if held and self.uneven and self.share.index < len(held):
            yield Part([held[self.share.index]], end)
        if held and not self.uneven:
            leave_out(len(held))

    def length(self, num_items: int) -> int:
        steps, rest = divmod(num_items, self.step)
        if self.drop_last or rest == 0:
            return steps
        if rest >= self.share.count or (steps and self.batch_size > 1):
            return steps + 1
        return steps + (self.uneven and self.share.index < rest)

    def refuse(self, num_items: int) -> str | None:
        count = self.share.count
        if self.drop_last and num_items < self.step:
            return (
                f"`batch_size={self.batch_size}, drop_last=True` over {num_items} samples leaves no batch: {count} "
                f"ranks take {self.step} samples a step. Pass `drop_last=False`, or a smaller `batch_size`."
            )
        if num_items < count:
            return (
                f"{num_items} samples are fewer than the {count} ranks that share them. Use at most {num_items} ranks."
            )
        if self.batch_size == 1 and num_items % count and not self.drop_last and not self.uneven:
            return (
                f"`batch_size=1` over {num_items} samples on {count} ranks leaves {num_items % count} samples for the "
                f"last step, and no batch to take another from. Pass a `batch_size` of 2 or more, `drop_last=True`, "
                "or, where ranks may have different numbers of batches, `use='validate'`, `'test'` or `'predict'`."
            )
        return None


@final
@dataclass(frozen=True, kw_only=True)
class BatchCut(Cut):
    """Batches of indices, one to each rank in turn; a last round that lacks some is split until each rank has one."""

    keeps_samples = False

    @property
    def reads(self) -> tuple[int, int]:
        return (1 if self.share.count == 1 else 2) * self.share.count, self.share.count

    def __call__(self, items: Iterator[Any], leave_out: LeaveOut) -> Iterator[Part]:
        count, before, end = self.share.count, list[Any](), 0
        if count == 1:
            for batch in items:
                end += _size(batch)
                yield Part(batch, end)
            return
        while len(round_ := list(islice(items, count))) == count:
            if before:
                end += sum(map(_size, before))
                yield Part(before[self.share.index], end, len(set(map(_size, before))) > 1)
            before = round_
        if round_:
            before, round_ = self._levelled(before, round_)
        for last in (before, round_):
            end += sum(map(_size, last))
            if self.share.index < len(last):
                yield Part(last[self.share.index], end, len(set(map(_size, last))) > 1)

    def skip(self, items: Iterator[Any], num_samples: int) -> Iterator[Any]:
        skipped = 0
        while skipped < num_samples:
            skipped += _size(next(items, range(num_samples)))
        if skipped > num_samples:
            raise ValueError(
                f"The checkpoint stands after {num_samples} samples of the epoch, and no batch of the batch sampler "
                "ends there. Let all ranks together read as many samples a step as in the run that was saved."
            )
        yield from items

    def _levelled(self, before: list[Any], last: list[Any]) -> tuple[list[Any], list[Any]]:
        """Both rounds with one batch per rank: the largest batches are halved, then those of the round before give."""
        count = self.share.count
        before, last = [list(batch) for batch in before], [list(batch) for batch in last]
        while len(last) < count and len(largest := max(last, key=len)) > 1:
            place = next(i for i, batch in enumerate(last) if batch is largest)
            half = (len(largest) + 1) // 2
            last[place : place + 1] = [largest[:half], largest[half:]]
        while len(last) < count and before and len(giver := max(before, key=len)) > 1:
            last.insert(0, [giver.pop()])
        if len(last) < count and not self.uneven:
            raise ValueError(
                f"The batch sampler ended with {len(last)} batches of one sample for {count} ranks, and the batches "
                "before have none to give. Let it yield a multiple of the number of ranks, or, where ranks may have "
                "different numbers of batches, pass `use='validate'`, `'test'` or `'predict'`."
            )
        return before, last

    def length(self, num_items: int) -> int:
        return -(-num_items // self.share.count)

    def refuse(self, num_items: int) -> str | None:
        return "The batch sampler yields no batch." if num_items == 0 else None


@final
@dataclass(frozen=True, kw_only=True)
class TurnCut(Cut):
    """Items that stay whole, one to each rank in turn."""

    @property
    def reads(self) -> tuple[int, int]:
        return self.share.count, self.share.count

    def __call__(self, items: Iterator[Any], leave_out: LeaveOut) -> Iterator[Part]:
        count, index, end = self.share.count, self.share.index, 0
        while len(round_ := list(islice(items, count))) == count:
            end += count
            yield Part(round_[index], end)
        if self.uneven and index < len(round_):
            yield Part(round_[index], end + len(round_))
        if round_ and not self.uneven:
            leave_out(len(round_))

    def length(self, num_items: int) -> int:
        rounds, rest = divmod(num_items, self.share.count)
        return rounds + (self.uneven and self.share.index < rest)

    def refuse(self, num_items: int) -> str | None:
        count = self.share.count
        if self.uneven or num_items % count == 0:
            return None
        return (
            f"{num_items} ready batches cannot be shared evenly by {count} ranks, and each rank trains on as many as "
            f"any other. Pass {num_items - num_items % count} or {num_items - num_items % count + count} batches, a "
            "`DataLoader` with a `batch_size`, or, where ranks may have different numbers of batches, "
            "`use='validate'`, `'test'` or `'predict'`."
        )


def _size(batch: object) -> int:
    """How many samples a batch of indices has."""
    return len(batch) if isinstance(batch, Sized) else 1
