"""Partition an order of items into equal shares: every item on one rank, nothing padded, nothing dropped.

A strategy chooses the `Share` of a rank. Ranks that hold parts of one model (tensor parallel) have the same share.

There is a class for each kind of items. `SampleCut`: single samples; the ranks' batches of a step, concatenated, are
the batch of one process with a batch size `count` times as large. Without a batch size, each item goes to one rank as
it is, round-robin. `BatchCut`: batches of indices, distributed round-robin; the last batches are split if necessary.
All ranks get the same number of batches. If equal numbers are impossible, `uneven=True` gives the first ranks one batch
more, and `uneven=False` drops the tail with a warning.

Note [The tail of an epoch]
With W ranks and a batch size of B, the last step of an epoch may have fewer than B * W samples. With at least W samples
the last step is divided evenly. With fewer, it takes the missing samples from the step before, which then has fewer
than B * W. So every rank has a sample at every step, and no sample is used twice. Only with B = 1 the step before has
no sample to spare.
"""

import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, final

T = TypeVar("T")

Use: TypeAlias = Literal["train", "validate", "test", "predict"]
"""For `train` every rank has the same number of batches. For the other uses it may differ if the data requires it."""
Uneven: TypeAlias = Literal["stop", "repeat"]
"""What all ranks do when the first of them has no batch left: stop, or repeat their last batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part `index` of `count` equal parts."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """This share of `items`: contiguous, in order, and at most one longer than any other share."""
        size, longer = divmod(len(items), self.count)
        start = self.index * size + min(self.index, longer)
        return items[start : start + size + (self.index < longer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The number of shares that are read as one, and whether the samples of each batch are permuted."""

    count: int
    permuted: bool

    def order(self, samples: list[Any]) -> list[Any]:
        """The samples of a batch, permuted if asked for: by their number alone, so that a run can be repeated."""
        return random.Random(len(samples)).sample(samples, len(samples)) if self.permuted else samples

    def shares(self) -> list[Share]:
        """The shares, in the order of ranks."""
        return [Share(index=index, count=self.count) for index in range(self.count)]


class Part(NamedTuple):
    """One rank's batch of a step."""

    batch: Any
    end: int
    """Number of samples that all ranks together have read in this iteration, up to the end of this step."""
    is_unequal: bool = False
    """Whether the ranks' batches of this step have different numbers of samples."""


@dataclass(frozen=True, kw_only=True)
class Cut(ABC):
    """Yields one share of an order of items, batch by batch."""

    share: Share
    uneven: bool

    @property
    @abstractmethod
    def reads(self) -> tuple[int, int]:
        """How many items must be read for the first batch, and for each further one."""

    @abstractmethod
    def __call__(self, items: Iterator[Any]) -> Iterator[Part]:
        """This share's batches. Warns if items at the end are dropped."""

    def skip(self, items: Iterator[Any], num_samples: int) -> Iterator[Any]:
        """The items after the first `num_samples` samples of the order, which are drawn now."""
        next(islice(items, num_samples, num_samples), None)
        return items

    @abstractmethod
    def length(self, num_items: int) -> int:
        """Number of batches of this share, of `num_items` items."""

    def is_even(self, num_items: int) -> bool:
        """Whether all ranks get the same number of batches, of `num_items` items."""
        first, last = Share(count=self.share.count), Share(index=self.share.count - 1, count=self.share.count)
        return len({replace(self, share=share).length(num_items) for share in (first, last)}) == 1

    @abstractmethod
    def refuse(self, num_items: int) -> str | None:
        """None if so many items can be distributed; otherwise the text of the error."""


@final
@dataclass(frozen=True, kw_only=True)
class SampleCut(Cut):
    """Single samples into batches of `batch_size`: see Note [The tail of an epoch]. None: items as they are."""

    batch_size: int | None = None
    drop_last: bool = False

    @property
    def step(self) -> int:
        """Number of samples in a full step of all ranks."""
        return (self.batch_size or 1) * self.share.count

    @property
    def ahead(self) -> int:
        """How many samples to read beyond a step before it is yielded, in case the last step must take from it."""
        return 0 if self.drop_last or self.batch_size is None or self.share.count == 1 else self.share.count

    @property
    def reads(self) -> tuple[int, int]:
        return self.step + self.ahead, self.step

    def __call__(self, items: Iterator[Any]) -> Iterator[Part]:
        held: list[Any] = []
        end, step, needed = 0, self.step, self.step + self.ahead
        size, index = self.batch_size, self.share.index
        mine: Any = index if size is None else slice(index * size, (index + 1) * size)
        while True:
            held += islice(items, needed - len(held))
            if len(held) < needed:
                break
            end += step
            yield Part(held[mine], end)
            del held[:step]
        if not self.drop_last:
            yield from self._tail(held, end + len(held))

    def _tail(self, held: list[Any], end: int) -> Iterator[Part]:
        count, rest = self.share.count, max(len(held) - self.step, 0)
        if rest and self.step > count:
            yield Part(self.share.of(held[:-count]), end - count, len(held) % count > 0)
            yield Part(self.share.of(held[-count:]), end)
            return
        if len(held) >= count:
            yield Part(self.share.of(held[: len(held) - rest]), end - rest, (len(held) - rest) % count > 0)
            held = held[len(held) - rest :]
        if held and self.uneven and self.share.index < len(held):
            mine = held[self.share.index]
            yield Part(mine if self.batch_size is None else [mine], end)
        if held and not self.uneven:
            warn_of_rest(len(held), self.share)

    def length(self, num_items: int) -> int:
        steps, rest = divmod(num_items, self.step)
        if self.drop_last or rest == 0:
            return steps
        if rest >= self.share.count or (steps and self.step > self.share.count):
            return steps + 1
        return steps + (self.uneven and self.share.index < rest)

    def refuse(self, num_items: int) -> str | None:
        count, rest = self.share.count, num_items % self.share.count
        if self.batch_size is None:
            if self.uneven or not rest:
                return None
            return (
                f"{num_items} ready batches cannot be shared evenly by {count} ranks, and each rank must train on as "
                f"many as any other. Pass {num_items - rest} or {num_items - rest + count} batches, a `DataLoader` "
                f"with a `batch_size`, or, {_NOT_TRAINED}"
            )
        if num_items < (self.step if self.drop_last else 1 if self.uneven else count):
            return (
                f"{num_items} samples leave no batch for each of the {count} ranks, which take {self.step} samples a "
                f"step (`batch_size={self.batch_size}, drop_last={self.drop_last}`). Look at the filter or path of the "
                "dataset, or pass a smaller `batch_size`, `drop_last=False`, or fewer ranks."
            )
        if self.batch_size == 1 and rest and not self.drop_last and not self.uneven:
            return (
                f"`batch_size=1` over {num_items} samples on {count} ranks leaves {rest} samples for the "
                "last step, and no batch to take another from. Pass a `batch_size` of 2 or more, `drop_last=True`, or, "
                + _NOT_TRAINED
            )
        return None


@final
@dataclass(frozen=True, kw_only=True)
class BatchCut(Cut):
    """Batches of indices, round-robin. Batches of an incomplete last round are split until each rank has one."""

    @property
    def reads(self) -> tuple[int, int]:
        return (1 if self.share.count == 1 else 2) * self.share.count, self.share.count

    def __call__(self, items: Iterator[Any]) -> Iterator[Part]:
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
                f"The checkpoint was taken after {num_samples} samples of the epoch, and no batch of the batch sampler "
                "ends there. Let all ranks together read as many samples per step as in the saved run."
            )
        return items

    def _levelled(self, before: list[Any], last: list[Any]) -> tuple[list[Any], list[Any]]:
        """The last two rounds, with a batch per rank: split the largest batches, then take from the round before."""
        count = self.share.count
        before, last = [list(batch) for batch in before], [list(batch) for batch in last]
        while len(last) < count and len(largest := max(last, key=len)) > 1:
            place = next(i for i, batch in enumerate(last) if batch is largest)
            half = (len(largest) + 1) // 2
            last[place : place + 1] = [largest[:half], largest[half:]]
        while len(last) < count and (givers := [batch for batch in before if len(batch) > 1]):
            last.insert(0, [givers[-1].pop()])
        if len(last) < count and not self.uneven:
            raise ValueError(
                f"The batch sampler ended with {len(last)} batches of one sample for {count} ranks, and the batches "
                f"before have none to spare. Let it yield a multiple of the number of ranks, or, {_NOT_TRAINED}"
            )
        return before, last

    def length(self, num_items: int) -> int:
        return -(-num_items // self.share.count)

    def is_even(self, num_items: int) -> bool:
        return not self.uneven or num_items % self.share.count == 0  # otherwise it depends on the last batches

    def refuse(self, num_items: int) -> str | None:
        return "The batch sampler yields no batch." if num_items == 0 else None


def warn_of_rest(num_items: int, share: Share) -> None:
    """Warn, on the first share, that so many items at the end are dropped. In a worker it writes to standard error."""
    if share.index == 0:
        warnings.warn(
            f"The last {num_items} batches of the epoch were too few to give each of the {share.count} ranks one, and "
            f"were dropped. Give the ranks equal parts, or, {_NOT_TRAINED}",
            stacklevel=2,
        )


def _size(batch: object) -> int:
    """How many samples a batch of indices has."""
    return len(batch) if isinstance(batch, Sized) else 1


_NOT_TRAINED = "where ranks may have different numbers of batches, pass `use='validate'`, `'test'` or `'predict'`."
_END = object()


def once(iterator: Iterator[T]) -> Iterator[T]:
    """The same items, by `next` alone.

    `islice`, `zip` and `for` call `iter` on an iterator, which makes the iterators of some streams (litdata's) begin
    again. Generators, and iterators of lists and ranges, are returned as they are.
    """
    return iterator if type(iterator).__module__ == "builtins" else _by_next(iterator)


def _by_next(iterator: Iterator[T]) -> Iterator[T]:
    while (item := next(iterator, _END)) is not _END:
        yield item  # type: ignore[misc]


def length_of(something: object) -> int | None:
    """`len(something)`, None if it has no length."""
    try:
        return len(something)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
