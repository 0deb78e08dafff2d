"""One seed, one order: that of torch in one process, and its global batches on several ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from devices import ACCELERATOR
from shares import in_order, read, share_out
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy
from fabric.strategies.data.loop_progress import LoopProgress

SIZE = 42


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE).tolist()
        random.shuffle(order)
        yield from order


class Late(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, ())) // 2 + random.randrange(2) + int(np.random.randint(10))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def drawing(**options: Any) -> RandomSampler:
    return RandomSampler(Numbers(), **options)


LOADERS: dict[str, Callable[..., Any]] = {
    "in order": lambda **to: DataLoader(Numbers(), **to),
    "shuffled": lambda **to: DataLoader(Numbers(), shuffle=True, **to),
    "shuffled by a generator": lambda **to: DataLoader(Numbers(), shuffle=True, generator=seeded(), **to),
    "with replacement": lambda **to: DataLoader(Numbers(), sampler=drawing(replacement=True), **to),
    "with replacement by a generator": lambda **to: DataLoader(
        Numbers(), sampler=drawing(replacement=True, num_samples=96, generator=seeded()), **to
    ),
    "more than once": lambda **to: DataLoader(Numbers(), sampler=drawing(num_samples=96, generator=seeded()), **to),
    "weighted": lambda **to: DataLoader(
        Numbers(), sampler=WeightedRandomSampler(torch.arange(1.0, 1 + SIZE), SIZE), **to
    ),
    "drawn late": lambda **to: DataLoader(Numbers(), sampler=Late(), **to),
    "stream": lambda **to: DataLoader(Shuffled(), **to),
}


def seed(number: int) -> None:
    torch.manual_seed(number), random.seed(number), np.random.seed(number)


def train(loader: Any, *, draws: bool) -> list[Any]:
    """The batches of three epochs, of which the second is left early, and what is drawn after them."""
    seen: list[Any] = []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if draws:  # as dropout does
                seen.append((torch.rand(()).item(), random.random(), np.random.rand()))
            if (epoch, number) == (1, 3):
                break
    return [*seen, torch.rand(()).item(), random.random(), np.random.rand()]


@pytest.mark.parametrize("workers", [{}, pytest.param({"num_workers": 2}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_one_process_reads_and_draws_as_plain_torch(name: str, workers: dict[str, Any]) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    for draws in (False, True):
        seed(7)
        expected = train(LOADERS[name](batch_size=4, **workers), draws=draws)
        seed(7)
        loader = LOADERS[name](batch_size=4, **workers)
        assert train(fabric.setup_dataloaders(loader), draws=draws) == expected


INDEXED = [name for name in LOADERS if name != "stream"]
"""Two workers of one process read the batches of a stream in turn, which are larger than those of a rank."""


@pytest.mark.slow
@pytest.mark.parametrize("name", INDEXED)
def test_workers_that_are_kept_change_no_order(name: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    seed(7)
    expected = train(LOADERS[name](batch_size=4, num_workers=1, persistent_workers=True), draws=True)
    seed(7)
    loader = fabric.setup_dataloaders(LOADERS[name](batch_size=4, num_workers=1, persistent_workers=True))
    assert train(loader, draws=True) == expected


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *[(name, {}) for name in LOADERS],
        *[pytest.param(name, {"num_workers": 2}, marks=pytest.mark.slow) for name in INDEXED],
    ],
)
def test_ranks_read_the_global_batches_of_one_process(name: str, count: int, workers: dict[str, Any]) -> None:
    seed(7)
    plain = LOADERS[name](batch_size=4 * count, **workers)
    expected = [[sample for batch in plain for sample in batch.tolist()] for _ in range(3)]
    seed(7)
    loaders = share_out(lambda _: LOADERS[name](batch_size=4, **workers), count)
    for epoch in range(3):
        next(iter(loaders[-1]))  # a look on one rank changes nothing
        seed(epoch)  # nor does what ranks draw
        assert in_order(read(loaders)) == expected[epoch], epoch


@pytest.mark.parametrize("name", ["shuffled", "shuffled by a generator"])
def test_ranks_that_evaluate_alone_train_in_one_order(name: str) -> None:
    progress = [LoopProgress() for _ in range(2)]
    seed(7)
    training = share_out(lambda _: LOADERS[name](batch_size=4), 2, numbers=progress)
    evaluation = share_out(lambda _: LOADERS["in order"](batch_size=4), 2, "validate", numbers=progress)
    seed(7)
    alone = LOADERS[name](batch_size=8), LOADERS["in order"](batch_size=8)
    for epoch in range(3):
        found = in_order(read(training))
        assert sorted(found) == list(range(SIZE))
        seed(7)  # these ranks share the generators of this process
        if epoch == 0 or name == "shuffled by a generator":  # the evaluation of one process draws from its generator
            assert found == [sample for batch in alone[0] for sample in batch.tolist()]
        list(evaluation[0]), list(alone[1])


def orders_of_new_loaders(fabric: Any, batch_size: int) -> list[list[list[int]]]:
    """Of four epochs, each over a loader of its own, the second of which is left early; before each evaluation."""
    seed(7)
    net = nn.Linear(1, 1)
    model = net if fabric is None else fabric.setup(net)
    prepare: Any = (lambda loader, **use: loader) if fabric is None else fabric.setup_dataloaders
    found = []
    for name in ("shuffled", "shuffled by a generator", "weighted", "in order"):
        evaluation, orders = prepare(DataLoader(Numbers(), batch_size), use="validate"), []
        for epoch in range(4):
            order: list[int] = []
            for number, batch in enumerate(prepare(LOADERS[name](batch_size=batch_size))):
                loss = model(batch[:, None].float()).sum()
                loss.backward() if fabric is None else fabric.backward(loss)
                order += batch.tolist() if fabric is None else fabric.all_gather(batch).flatten().tolist()
                if (epoch, number) == (1, 2):
                    break
            orders.append(order)
            list(evaluation)
        found.append(orders)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_loaders_that_are_made_anew_in_each_epoch_have_the_orders_of_one_process(strategy: str) -> None:
    expected = orders_of_new_loaders(None, 6)
    assert expected[0][0] != expected[0][2] != expected[0][3]
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2) as fabric:
        assert fabric.launch(orders_of_new_loaders, 3) == expected


def first_experiment(fabric: Fabric | None, batch_size: int) -> list[float]:
    """The mean losses of two epochs, from one seed."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(48, 4, generator=seeded())
    loader: Any = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size, shuffle=True)
    model: Any = net
    if fabric is not None:
        model, optimizer = fabric.setup(net, optimizer)
        loader = fabric.setup_dataloaders(loader)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward() if fabric is None else fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item() if fabric is None else float(fabric.all_reduce(loss.detach())))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("single_device", 1),
        ("ddp", 2),
        ("fsdp", 2),
        (ModelParallelStrategy(parallelize_fn=lambda model, mesh: fully_shard(model, mesh=mesh["shard"]), shard=2), 2),
        ("deepspeed_stage_2", 2),
        ("deepspeed_stage_3", 2),
        ("ddp_sharded", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # each worker names a case alike: no address
)
def test_the_first_experiment_of_a_newcomer_has_the_losses_of_plain_torch(strategy: Any, devices: int) -> None:
    expected = first_experiment(None, 8)
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=devices) as fabric:
        found = fabric.launch(first_experiment, 8 // devices)
    assert found == pytest.approx(expected, rel=1e-5)
