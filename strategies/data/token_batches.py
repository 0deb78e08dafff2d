"""Batches of up to so many tokens, instead of so many samples: `fabric.token_batches`.

Samples wait in a window of some batches, in the order of the sampler or the stream. A batch takes the oldest of them,
and then each next one that still fits, so that batches are nearly full, and a sample is delayed, never dropped. The
batches depend on the order of samples alone, not on the number of ranks: `setup_dataloaders` hands them out to the
ranks in turn, and splits the last ones until each rank has one (`BatchCut`), so any number of ranks resumes an epoch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar, final, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from fabric.strategies.data.rng import seed_process

T = TypeVar("T")
TooLong: TypeAlias = Literal["error", "alone", "cut"]
"""What becomes of a sample with more tokens than a batch may have."""

_WINDOW_BATCHES = 16
"""Tokens of so many batches wait. Of 20,000 samples with lengths of a lognormal distribution (mean 200, sigma 1),
batches of 4,096 tokens had 99.9 % of these, each but the last ones 99.5 % or more; with one batch waiting 93.7 %."""
_NO_LENGTH = "`len` of `token_batches` depends on the order of samples. End the loop by steps: `fabric.num_steps < n`."


def token_batches(
    dataset: Any,
    max_tokens: int,
    *,
    length: Sequence[int] | Callable[[Any], int] | None = None,
    too_long: TooLong = "error",
    pack: bool = False,
    shuffle: bool = False,
    sampler: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A `DataLoader` whose batches have up to `max_tokens` tokens each, for `setup_dataloaders`.

        loader = token_batches(dataset, 8192, length=lengths, pack=True, shuffle=True)
        for batch in fabric.setup_dataloaders(loader):
            loss = cross_entropy(model(batch["input_ids"], batch["cu_seqlens"]), batch["labels"], reduction="sum")
            fabric.backward(loss, weight=len(batch["labels"]))

    Each rank's batch has so many tokens. Every sample comes once in an epoch, and all ranks have equally many steps.
    The order of batches does not depend on the number of ranks.

    `length`: the tokens of each sample, by index, or a function of a sample; None: `len(sample["input_ids"])` of a
    dictionary, `len(sample)` of another sample. A function is called here for each sample of a map-style dataset.
    `too_long`: "error" (here; of a stream, when it is read), "alone" (a batch of its own), "cut" (the first tokens).
    `pack`: a batch is a dictionary with each field of the samples one after the other, `(T,)`, and "position_ids"
    `(T,)`, "cu_seqlens" `(N + 1,)` of int32, and "max_seqlen", as attention over sequences of variable length takes
    them. Otherwise `collate_fn` makes it of a list of samples; None: it is the list. `shuffle`, `sampler`, `generator`
    and `options`: as `DataLoader` has them. Raises: ValueError: a sample is too long; TypeError: `batch_size` is given.
    """
    if too_long not in get_args(TooLong) or max_tokens < 1:
        raise ValueError(
            f"`token_batches(max_tokens={max_tokens!r}, too_long={too_long!r})`: write a number from 1 on, and "
            f"{', '.join(map(repr, get_args(TooLong)))}."
        )
    if given := {"batch_size", "batch_sampler", "drop_last"} & options.keys():
        raise TypeError(f"`token_batches({given.pop()}=...)`: `max_tokens` decides what is in a batch. Leave it out.")
    if pack and collate_fn is not None:
        raise TypeError("`token_batches(pack=True, collate_fn=...)`: each makes the batch. Pass one of them.")
    collate: Callable[[list[Any]], Any] = packed if pack else collate_fn or list
    if too_long == "cut":
        collate = partial(_cut, collate, max_tokens)
    measure = length if callable(length) else _num_tokens
    allowed = partial(_allowed, max_tokens=max_tokens, too_long=too_long)
    if isinstance(dataset, IterableDataset):
        stream = TokenStream(dataset, measure, allowed, max_tokens)
        return DataLoader(stream, batch_size=None, collate_fn=collate, **options)
    if length is None or callable(length):
        length = [measure(dataset[index]) for index in range(len(dataset))]
    lengths = [*map(int, length)]
    if len(lengths) != len(dataset):
        raise ValueError(f"`length` has {len(lengths)} entries, and the dataset {len(dataset)} samples: pass one each.")
    order = DataLoader(dataset, shuffle=shuffle, sampler=sampler, generator=generator).sampler
    batches = TokenBatchSampler(order, [allowed(each, index) for index, each in enumerate(lengths)], max_tokens)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **options)


def _allowed(length: int, index: int, max_tokens: int, too_long: TooLong) -> int:
    """The tokens that a sample has in its batch. Raises: ValueError: it is too long."""
    if length > max_tokens and too_long == "error":
        raise ValueError(
            f"Sample {index} has {length} tokens, and a batch takes {max_tokens}. Pass `too_long='alone'` for a batch "
            f"of its own, `too_long='cut'` for its first {max_tokens} tokens, or a larger `max_tokens`."
        )
    return min(length, max_tokens) if too_long == "cut" else length


@final
class TokenBatchSampler(Sampler[list[int]]):
    """Batches of indices with up to `max_tokens` tokens. `lengths`: of each sample."""

    def __init__(self, sampler: Iterable[int], lengths: Sequence[int], max_tokens: int) -> None:
        self.sampler, self.lengths, self.max_tokens = sampler, lengths, max_tokens

    def __iter__(self) -> Iterator[list[int]]:
        return _filled(((index, self.lengths[index]) for index in self.sampler), self.max_tokens)

    def __len__(self) -> int:
        raise TypeError(_NO_LENGTH)


@final
class TokenStream(IterableDataset[list[Any]]):
    """Batches of samples of an iterable dataset, as lists, with up to so many tokens.

    # Note [Workers of a token stream]
    Each of several workers reads the whole stream, with equal random numbers, and makes every n-th batch of its rank;
    torch takes the batches from the workers in turn, so they are those of one worker, in its order. A dataset that
    would read a part in each worker finds that it is read by one.
    """

    def __init__(
        self, dataset: Any, measure: Callable[[Any], int], allowed: Callable[[int, int], int], max_tokens: int
    ) -> None:
        self.dataset, self.measure, self.allowed, self.max_tokens = dataset, measure, allowed, max_tokens
        self._worker: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        number, count = self.enter_worker()
        return islice(self.batches(), number, None, count)

    def __len__(self) -> int:
        raise TypeError(_NO_LENGTH)

    def batches(self) -> Iterator[list[Any]]:
        """All batches."""
        return _filled(self._measured(), self.max_tokens)

    def enter_worker(self) -> tuple[int, int]:
        """The number of this worker, and of all: see Note [Workers of a token stream]. Called before reading."""
        info = get_worker_info()
        if info is not None and self._worker is None:
            self._worker, seed = (info.id, info.num_workers), info.seed - info.id
            seed_process(seed)
            for name, value in {"id": 0, "num_workers": 1, "seed": seed}.items():
                object.__setattr__(info, name, value)  # WorkerInfo guards its attributes
        return self._worker or (0, 1)

    def _measured(self) -> Iterator[tuple[Any, int]]:
        for index, sample in enumerate(self.dataset):
            yield sample, self.allowed(self.measure(sample), index)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if it has one."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _filled(samples: Iterator[tuple[T, int]], max_tokens: int) -> Iterator[list[T]]:
    """Batches of samples, given with their lengths."""
    waiting: list[tuple[T, int]] = []
    num_waiting, last = 0, list[list[T]]()
    while True:
        while num_waiting < _WINDOW_BATCHES * max_tokens and (found := next(samples, None)) is not None:
            waiting.append(found)
            num_waiting += found[1]
        if not waiting:
            yield from sorted(last, key=len)  # those with many samples last: they are split between ranks
            return
        batch, rest, room = [waiting[0]], list[tuple[T, int]](), max_tokens - waiting[0][1]
        for each in waiting[1:]:
            if each[1] <= room:
                batch.append(each)
                room -= each[1]
            else:
                rest.append(each)
        is_full = num_waiting >= _WINDOW_BATCHES * max_tokens
        waiting, num_waiting = rest, num_waiting - sum(length for _, length in batch)
        if is_full:
            yield [sample for sample, _ in batch]
        else:
            last.append([sample for sample, _ in batch])


def _num_tokens(sample: Any) -> int:
    return len(sample["input_ids"] if isinstance(sample, Mapping) else sample)


def _cut(collate: Callable[[list[Any]], Any], max_tokens: int, samples: Sequence[Any]) -> Any:
    return collate([_first_tokens(each, max_tokens) for each in samples])


def _first_tokens(sample: Any, max_tokens: int) -> Any:
    """A sample without what its fields have after so many tokens; fields of other lengths stay."""
    if not isinstance(sample, Mapping):
        return sample[:max_tokens]
    num_tokens = _num_tokens(sample)
    return {name: each[:max_tokens] if _has_length(each, num_tokens) else each for name, each in sample.items()}


def _has_length(field: Any, num_tokens: int) -> bool:
    is_scalar = isinstance(field, str) or (isinstance(field, Tensor) and field.ndim == 0)
    return not is_scalar and isinstance(field, Sized) and len(field) == num_tokens


def packed(samples: Sequence[Any]) -> dict[str, Any]:
    """Samples one after the other, without padding: see `token_batches`. Fields of one value a sample: `(N,)`."""
    fields = [sample if isinstance(sample, Mapping) else {"input_ids": sample} for sample in samples]
    lengths = [len(each["input_ids"]) for each in fields]
    batch: dict[str, Any] = {}
    for name, first in fields[0].items():
        tensors = [torch.as_tensor(each[name]) for each in fields]
        batch[name] = torch.cat(tensors) if _has_length(first, lengths[0]) else torch.stack(tensors)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    batch["position_ids"] = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(torch.tensor(lengths))
    batch["cu_seqlens"], batch["max_seqlen"] = ends.to(torch.int32), max(lengths)
    return batch
