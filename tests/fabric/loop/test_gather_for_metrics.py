"""Values of an evaluation: those of every sample once, in the order of one process, or an error on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from fakes import run_threads
from shares import share_out
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from fabric import Fabric
from fabric.loop.gather_for_metrics import gather_for_metrics
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.data.context import LoaderContext
from fabric.strategies.data.device_loader import DeviceLoader, Reading
from fabric.strategies.data.partition import Share
from fabric.strategies.data.uneven import Agreement
from fabric.strategies.loader_hook import votes_over


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def loaders_over(size: int, batch_size: int) -> dict[str, Any]:
    numbers: Any = range(size)
    return {
        "samples": DataLoader(numbers, batch_size),
        "batch sampler": DataLoader(
            numbers, batch_sampler=list(BatchSampler(SequentialSampler(numbers), batch_size, False))
        ),
        "one by one": DataLoader(numbers, batch_size=None),
        "stream": DataLoader(Stream(size), batch_size),
        "ready batches": list(torch.arange(size).split(batch_size)),
    }


def gather(loaders: list[DeviceLoader], values_of: Callable[[Any], Any]) -> list[Any]:
    """What each rank gets: ranks are threads, which iterate one after the other."""
    values = [[values_of(batch) for batch in loader] for loader in loaders]

    def body(collective: Collective) -> Any:
        share = Share(index=collective.rank, count=collective.size)
        return gather_for_metrics(collective, share, values[collective.rank], loaders[collective.rank])

    return run_threads(len(loaders), body)


def test_every_sample_is_gathered_once_and_in_the_order_of_the_dataset_on_any_number_of_ranks() -> None:
    draw = random.Random(0)
    for _ in range(12):
        count, batch_size = draw.randint(1, 4), draw.randint(1, 5)
        size = draw.randint(1, 40)
        for name in loaders_over(size, batch_size):
            if name == "batch sampler" and batch_size < count:
                continue  # the last batches of one round have too few samples to give
            loaders = share_out(
                [loaders_over(size, batch_size)[name] for _ in range(count)], count, "validate", reported=[]
            )
            found = gather(loaders, lambda batch: torch.as_tensor(batch).reshape(-1))
            assert [each.tolist() for each in found] == [list(range(size))] * count, (name, size, count, batch_size)


def test_tokens_scalars_and_nests_are_gathered_in_the_containers_of_one_batch() -> None:
    def values_of(batch: Any) -> Any:
        return {"tokens": batch.repeat_interleave(batch), "loss": 2.0 * len(batch), "pair": (batch, None)}

    for found in gather(share_out([torch.arange(7).split(2)] * 2, 2, "validate"), values_of):
        assert found["tokens"].tolist() == [number for number in range(7) for _ in range(number)]
        assert found["loss"].tolist() == [4, 4, 4, 2]
        assert found["loss"].dtype == torch.float64
        assert found["pair"][0].tolist() == list(range(7))
        assert found["pair"][1] is None


def test_samples_of_different_lengths_raise() -> None:
    batches = [torch.full((2, length), length) for length in (3, 1, 2)]
    with pytest.raises(
        ValueError, match=r"batch 1 are values\[i\]: int64 \(any, 1\) .* batch 0 .*\(any, 3\).* pad them"
    ):
        gather(share_out([batches], 1, "validate"), lambda batch: batch)
    with pytest.raises(CollectiveError, match=r"int64 \(any, 3\) on cpu(?s:.)*Where samples differ in length, pad"):
        gather(share_out([batches[:2]] * 2, 2, "validate"), lambda batch: batch)


def test_ranks_without_a_batch_get_the_values_of_the_others() -> None:
    loaders = share_out([DataLoader(Stream(2), 4)] * 3, 3, "validate", reported=[])
    assert [len(list(loader)) for loader in loaders] == [1, 1, 0]
    for found in gather(loaders, lambda batch: (batch, 1.0)):
        assert found[0].tolist() == [0, 1]
        assert found[1].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"of a `DataLoader` that has yielded no batch on any rank"):
        gather(share_out([DataLoader(Stream(0), 4)] * 2, 2, "validate", reported=[]), lambda batch: batch)


def test_ranks_that_read_the_same_batches_are_counted_once() -> None:
    shares = [Share(index=rank // 2, count=2) for rank in range(4)]
    loaders = share_out([DataLoader(range(6), 2)] * 4, 4, "validate", shares=shares)  # type: ignore[arg-type]
    values = [list(loader) for loader in loaders]

    def body(collective: Collective) -> Any:
        rank = collective.rank
        return gather_for_metrics(collective, shares[rank], values[rank], loaders[rank]).tolist()

    assert run_threads(4, body) == [list(range(6))] * 4


def test_batches_that_a_rank_repeats_to_even_out_the_ranks_are_left_out() -> None:
    def body(collective: Collective) -> Any:
        mine = [[0, 2, 4], [1]][collective.rank]
        agreement = Agreement("repeat", votes_over(collective), "parts", lambda words: None, ahead=bool(len(mine) % 2))
        loader = DeviceLoader(
            mine, Reading(source=mine, agreement=agreement), LoaderContext(share=Share(), device=torch.device("cpu"))
        )
        values = list(loader)
        share = Share(index=collective.rank, count=2)
        return len(values), gather_for_metrics(collective, share, values, loader).tolist()

    assert run_threads(2, body) == [(3, [0, 1, 2, 4])] * 2


def test_values_that_are_not_those_of_the_last_iteration_raise_and_say_why() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    first, second = fabric.setup_dataloaders(DataLoader(range(6), 2), DataLoader(range(5), 1), use="validate")  # type: ignore[arg-type]
    values = list(first)
    assert fabric.gather_for_metrics(values, first).tolist() == list(range(6))
    assert len(list(second)) == 5
    with pytest.raises(
        ValueError, match=r"the values of 3 batches, and the last iteration of this `DataLoader` gave 5"
    ):
        fabric.gather_for_metrics(values, second)
    with pytest.raises(ValueError, match=r"values of 6 batches.* gave 3. Begin each iteration with an empty list"):
        fabric.gather_for_metrics(values + list(first), first)
    batches = iter(first)
    with pytest.raises(
        RuntimeError, match=r"has had 1 batches, and goes on or was left by `break`. Call it once, after"
    ):
        fabric.gather_for_metrics([next(batches)], first)
    del batches
    with pytest.raises(RuntimeError, match="has had 1 batches"):
        fabric.gather_for_metrics(values, first)
    with pytest.raises(RuntimeError, match="has had 0 batches"):
        fabric.gather_for_metrics([], fabric.setup_dataloaders(DataLoader(range(6), 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the values of 6 batches, .* append once for each"):
        fabric.gather_for_metrics(torch.cat(list(first)), first)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"given a `list` as loader. Pass what `fabric.setup_dataloaders` returned"):
        fabric.gather_for_metrics(values, values)
    with pytest.raises(ValueError, match=r"values of batch 2 are values\[i\]\[0\]: .*, and those of batch 0"):
        fabric.gather_for_metrics([*list(first)[:2], (torch.ones(2),)], first)
    fabric.close()
