"""Ranks that read data of different lengths: none waits for another for ever, and nothing is lost unsaid."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import sklearn  # noqa: F401  # datasets imports it late, and it sets a variable of the environment
import torch
from datasets import IterableDataset as Stream
from devices import ACCELERATOR
from fakes import run_threads
from shares import ranks_by, share_out
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from worlds import preload, run_world

from fabric import Fabric
from fabric.launchers.launcher import WorkerError
from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.data.context import LoaderContext
from fabric.strategies.data.loaders import process_dataloader
from fabric.strategies.data.partition import Share, Uneven
from fabric.strategies.data.uneven import Agreement
from fabric.strategies.loader_hook import votes_over


@pytest.fixture(autouse=True, scope="module")
def ranks_import_the_libraries() -> None:
    """They import this module, and what it imports: 2 s in each rank."""
    preload("sklearn", "datasets")


def agree_over_threads(lengths: list[int], uneven: Uneven, *, ahead: bool, epochs: int = 1) -> list[Any]:
    """For each rank: its batches, numbered, of each epoch, or the error; and what was said."""

    def body(collective: Collective) -> Any:
        reported: list[str] = []
        agreement = Agreement(uneven, votes_over(collective), "parts", reported.append, ahead=ahead)
        data = range(lengths[collective.rank])
        try:
            return [list(agreement(iter(data), lambda: next(iter(data), None))[1]) for _ in range(epochs)], reported
        except RuntimeError as error:
            return str(error), reported

    return run_threads(len(lengths), body)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("uneven", ["stop", "repeat"])
def test_ranks_with_the_same_number_of_batches_read_them_all_without_a_warning(uneven: Uneven, ahead: bool) -> None:
    for length in (0, 1, 4, 60):
        found = agree_over_threads([length] * 3, uneven, ahead=ahead, epochs=2)
        assert found == [([list(range(length))] * 2, [])] * 3


@pytest.mark.parametrize("ahead", [True, False])
def test_ranks_stop_with_the_first_that_ends_with_one_warning(ahead: bool) -> None:
    rng = random.Random(0)
    for lengths in (
        [3, 2],
        [0, 2],
        [5, 1, 5],
        *([rng.randrange(high) for _ in range(3)] for high in (5, 5, 5, 80, 80)),
    ):
        if len(set(lengths)) == 1:
            continue
        shortest = min(lengths)
        for batches, reported in agree_over_threads(lengths, "stop", ahead=ahead, epochs=2):
            assert batches == [list(range(shortest))] * 2
            assert len(reported) == 1
    (_, reported), _ = agree_over_threads([3, 2], "stop", ahead=ahead)
    assert reported == [
        "The data that each rank reads by `parts` has different numbers of batches: rank 1 had 2, and rank 0 more, "
        "which are not used: all ranks stop at the same step. To use all data, pass "
        '`setup_dataloaders(..., uneven="repeat")`, with which ranks that have ended repeat their last batch, and it '
        "counts zero in gradients; or make the parts equal. This is reported once."
    ]


@pytest.mark.parametrize("ahead", [True, False])
def test_ranks_that_have_ended_repeat_their_last_batch_until_all_have_read_everything(ahead: bool) -> None:
    for lengths in ([5, 2], [1, 4, 3], [70, 33], [3, 41, 64]):
        for rank, (batches, reported) in enumerate(agree_over_threads(lengths, "repeat", ahead=ahead, epochs=2)):
            assert batches == [[min(step, lengths[rank] - 1) for step in range(max(lengths))]] * 2
            assert len(reported) == 1
    (_, reported), _ = agree_over_threads([5, 2], "repeat", ahead=ahead)
    assert (
        "has different numbers of batches: 5 on rank 0, 2 on rank 1. The ranks take 5 steps, and those" in reported[0]
    )
    for words, _ in agree_over_threads([0, 2], "repeat", ahead=ahead):
        assert "has no batch for rank 0, and nothing to repeat there. Give every rank some data." in words


class Remembering(DataLoader[Any]):
    """Knows which of its iterators exist: with workers, each has processes of its own."""

    iterators: ClassVar[list[Any]] = []

    def __iter__(self) -> Any:
        batches = super().__iter__()
        self.iterators.append(weakref.ref(batches))
        return batches


def test_a_loop_that_is_left_lets_go_of_its_batches_without_the_garbage_collector() -> None:
    def body(collective: Collective) -> None:
        votes = partial(votes_over, collective)
        ranks = replace(ranks_by(collective.all_gather_object, collective.size), votes=votes)
        share = Share(index=collective.rank, count=collective.size)
        context = LoaderContext(share=share, device=torch.device("cpu"), ranks=ranks, uneven="repeat")
        loader = process_dataloader(Remembering(range(8), 2), context, distribute=False)  # type: ignore[arg-type]
        for _, _ in zip(range(3), loader, strict=False):
            pass
        assert loader.state_dict()["cursor"]["batches"] == 3

    gc.disable()
    try:
        run_threads(2, body)
        assert len(Remembering.iterators) == 2
        assert [each() for each in Remembering.iterators] == [None, None]
    finally:
        gc.enable()


def test_what_a_loop_may_change_is_not_read_ahead() -> None:
    def body(collective: Collective) -> list[int]:
        state, seen = [0], []
        agreement = Agreement("stop", votes_over(collective), "parts", print, ahead=False)
        for batch in agreement((state[0] for _ in range(4)), lambda: None)[1]:
            seen.append(batch)
            state[0] += 1
        return seen

    assert run_threads(2, body) == [[0, 1, 2, 3]] * 2


def test_one_batch_is_read_ahead_where_that_was_said() -> None:
    def body(collective: Collective) -> list[int]:
        agreement = Agreement("stop", votes_over(collective), "parts", print, ahead=True)
        supply, batches = agreement(iter(range(9)), lambda: None)
        return [supply.num_read - step for step, _ in enumerate(batches, 1)]

    assert run_threads(2, body) == [[1] * 8 + [0]] * 2


def numbers(files: list[range]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from ({"x": float(number)} for number in file)


def files(*lengths: int) -> Any:
    """A stream of Hugging Face over files of such lengths, one for each rank."""
    return Stream.from_generator(numbers, gen_kwargs={"files": [range(length) for length in lengths]})


class Own(IterableDataset[Tensor]):
    """What users write: each rank reads its own part, and the fabric cannot know."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((1,), float(number)) for number in range(self.length))


class Some(Sampler[int]):
    """A sampler of the user's, split over ranks unevenly."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 4 + 2 * self.rank


def on_fabric(world: World, strategy: str, body: Callable[[Fabric], Any]) -> Any:
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, launcher="external") as fabric:
        fabric.launch()
        return body(fabric)


def train(fabric: Fabric, loader: Any) -> int:
    """Train with collectives of the loop's own between batches; how many steps."""
    torch.manual_seed(0)
    net = nn.Linear(1, 4)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    steps = 0
    for batch in loader:
        inputs = batch["x"] if isinstance(batch, dict) else batch
        fabric.backward(model(inputs.float().reshape(-1, 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        assert fabric.all_gather(torch.tensor(steps)).tolist() == [steps] * fabric.world_size
        steps += 1
    return steps


def every_kind_of_stream(fabric: Fabric) -> dict[str, int]:
    rank = fabric.global_rank
    loaders = {
        "shards": fabric.setup_dataloaders(DataLoader(files(12, 5), 2)),
        "three steps": fabric.setup_dataloaders(DataLoader(files(6, 6), 2)),
        "workers": fabric.setup_dataloaders(DataLoader(files(12, 5), 2, num_workers=1)),
        "stateful": fabric.setup_dataloaders(StatefulDataLoader(files(12, 5), 2)),
        "repeat": fabric.setup_dataloaders(DataLoader(files(12, 5), 2), uneven="repeat"),
        "own": fabric.setup_dataloaders(DataLoader(Own(3 + rank), 1), use_distributed_sampler=False, uneven="stop"),
        "sampler": fabric.setup_dataloaders(DataLoader(range(8), 2, sampler=Some(2, rank)), uneven="stop"),  # type: ignore[arg-type]
        "iterable": fabric.setup_dataloaders(
            [torch.ones(2)] * (2 + rank), use_distributed_sampler=False, uneven="repeat"
        ),
    }
    return {name: train(fabric, loader) for name, loader in loaders.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_two_ranks_train_on_streams_of_different_lengths_to_the_same_step() -> None:
    expected = {"shards": 3, "three steps": 3, "workers": 3, "stateful": 3, "repeat": 6, "own": 3, "sampler": 2}
    assert run_world(2, on_fabric, "ddp", every_kind_of_stream) == [expected | {"iterable": 3}] * 2


def leave_and_nest(fabric: Fabric) -> list[Any]:
    long, short = (fabric.setup_dataloaders(DataLoader(files(8, 6), 1)) for _ in range(2))
    values = lambda loader, stop: [float(batch["x"]) for batch in itertools.islice(loader, stop)]  # noqa: E731
    found: list[Any] = [values(long, 2), values(long, None)]  # left early, and then read to the end
    found.append(len(list(zip(long, short, strict=True))))
    found.append([len(values(short, None)) for _ in values(long, 3)])
    validation = fabric.setup_dataloaders(DataLoader(files(8, 6), 1), use="validate")
    alone = fabric.setup_dataloaders(DataLoader(Own(4), 1), use_distributed_sampler=False)
    if fabric.global_rank == 0:
        found.append((len(values(validation, None)), len(list(alone))))
    fabric.barrier()
    return found


@pytest.mark.slow
def test_loops_may_be_left_nested_and_zipped_and_one_rank_may_validate_alone() -> None:
    first, second = run_world(2, on_fabric, "ddp", leave_and_nest)
    assert first[:4] == second == [[0.0, 1.0], [0, 1, 2, 3, 4, 5], 6, [6, 6, 6]]
    assert first[4] == (8, 4)


def peek(fabric: Fabric) -> str:
    loader = fabric.setup_dataloaders(DataLoader(files(6, 6), 1))
    if fabric.global_rank == 1:
        next(iter(loader))
    try:
        for _ in loader:
            pass
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_rank_that_reads_a_batch_alone_raises_on_every_rank() -> None:
    first, second = run_world(2, on_fabric, "ddp", peek)
    assert first == second
    assert "they are at different batches (rank 0: iteration 1, batch 1, 1 before it; rank 1: " in first
    assert "rank 1: iteration 2, batch 0, 1 before it;" in first


def fail_within(fabric: Fabric) -> None:
    for number, _ in enumerate(fabric.setup_dataloaders(DataLoader(files(6, 6), 1))):
        if number == 2 and fabric.global_rank == 1:
            raise ValueError("of the loop")


@pytest.mark.slow
def test_a_rank_that_raises_within_the_loop_ends_the_others_with_its_error() -> None:
    with pytest.raises(WorkerError, match="of the loop"):
        run_world(2, on_fabric, "ddp", fail_within)


def test_arguments_that_exclude_each_other_are_refused() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    loader = DataLoader(Own(3), 1)
    with pytest.raises(ValueError, match=r"`setup_dataloaders\(uneven='pad'\)`: write one of 'stop', 'repeat'"):
        fabric.setup_dataloaders(loader, uneven="pad")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"uneven='stop', use='test'\)`: every rank evaluates all of its batches"):
        fabric.setup_dataloaders(loader, uneven="stop", use="test")
    assert [float(batch) for batch in fabric.setup_dataloaders(loader, uneven="repeat")] == [0, 1, 2]


def test_different_known_lengths_raise_with_the_argument_to_pass() -> None:
    with pytest.raises(ValueError, match=r"4, 6 batches, .* pass `uneven=\"stop\"` or `uneven=\"repeat\"`"):
        share_out(lambda rank: DataLoader(range(8), 1, sampler=Some(2, rank)), 2)  # type: ignore[arg-type]


def count_messages(fabric: Fabric) -> int:
    """Collectives on the fabric's own process group while a stream is read."""
    loader = fabric.setup_dataloaders(DataLoader(files(6, 6), 1))
    calls: list[str] = []
    run = fabric.collective._run  # type: ignore[attr-defined]
    fabric.collective._run = lambda *args, **to: (calls.append(args[0]), run(*args, **to))[1]  # type: ignore[attr-defined]
    assert len(list(loader)) == 6
    return len(calls)


def test_the_agreement_sends_nothing_over_the_process_group_of_the_loop() -> None:
    assert run_world(2, on_fabric, "ddp", count_messages) == [0, 0]
