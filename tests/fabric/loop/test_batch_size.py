"""The largest batch size that fits, agreed by all ranks, and everything as before."""

import random
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import (
    DeepSpeedStrategy,
    ManualContext,
    ManualStrategy,
    ModelParallelStrategy,
    Parallelized,
    Pipeline,
    Strategy,
)
from fabric.strategies.strategy_registry import make_strategy


def state_of(fabric: Fabric, model: Any, optimizer: Any, loader: Any) -> Any:
    return {
        "model": {name: each.clone() for name, each in model.state_dict().items()},
        "gradients": [each.grad for each in model.parameters()],
        "optimizer": str(fabric.state_dict(model, optimizer, all_ranks=True)[1]),
        "generators": (torch.get_rng_state().tolist(), random.getstate()),
        "loader": loader.state_dict(),
        "steps": fabric.num_steps,
    }


def find(world: World, strategy: str) -> Any:
    """Between the steps of a loop, with a limit of memory of our own on each rank."""
    with Fabric(accelerator="cpu", strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        fabric.seed_everything(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=0.1))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.rand(24, 4)), batch_size=2, shuffle=True))
        limit = [40, 25, 33][fabric.global_rank]
        sizes: list[int] = []

        def run(batch_size: int) -> None:
            sizes.append(batch_size)
            loss = model(torch.rand(batch_size, 4)).sum()
            if batch_size > limit:  # a limit of our own, between forward and backward
                raise torch.OutOfMemoryError("CUDA out of memory.")
            fabric.backward(loss, weight=batch_size)
            random.random()

        found = []
        for number, (batch,) in enumerate(loader):
            if number == 1:
                before = state_of(fabric, model, optimizer, loader)
                found.append(fabric.find_batch_size(run, start=4))
                found.append(fabric.find_batch_size(run, start=100, most=130))
                found.append(fabric.find_batch_size(run, start=3, most=7))
                assert str(state_of(fabric, model, optimizer, loader)) == str(before)
            fabric.backward(model(batch).sum(), weight=len(batch))
            optimizer.step()
            optimizer.zero_grad()
        assert fabric.num_steps == 24 // (2 * fabric.world_size)
        assert sizes[:4] == [4, 8, 16, 32]
        return found, {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "size", "expected"), [("single_device", 1, 40), ("ddp", 3, 25), ("ddp_sharded", 2, 25)]
)
def test_all_ranks_find_the_size_that_fits_on_every_rank(strategy: str, size: int, expected: int) -> None:
    for found, _ in run_world(size, find, strategy):
        assert found == [expected, expected, 7]


def train(world: World, finds: bool) -> Any:
    with Fabric(accelerator="cpu", strategy="ddp", devices=world.size) as fabric:
        fabric.launch()
        fabric.seed_everything(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.rand(24, 4)), batch_size=2, shuffle=True))
        if finds:
            fabric.find_batch_size(lambda size: fabric.backward(model(next(iter(loader))[0]).sum()), most=2)
        batches = iter(loader)
        (first,) = next(batches)
        if finds:
            fabric.find_batch_size(lambda size: fabric.backward(model(first[:size]).sum()), start=2, most=5)
        del batches
        for (batch,) in loader:
            fabric.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        return {name: each.tolist() for name, each in model.state_dict().items()}


def test_a_run_that_has_looked_for_the_size_has_the_numbers_of_one_that_has_not() -> None:
    assert run_world(2, train, True) == run_world(2, train, False)


def split(model: Any, stage: int, num_stages: int) -> Any:
    return model[stage : stage + 1]


def sharded(module: nn.Module, context: ManualContext) -> Parallelized:
    from torch.distributed.fsdp import fully_shard

    return Parallelized(module=fully_shard(module, mesh=context.mesh))


def refuse(world: World, strategy: Strategy) -> str:
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model, _ = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        if isinstance(strategy, ManualStrategy):  # whose shards show no gradients
            with fabric.no_backward_sync(model):
                fabric.backward(model(torch.rand(2, 2)).sum())
        with pytest.raises(ValueError, match="`find_batch_size` cannot try sizes here") as refused:
            fabric.find_batch_size(never)
        return str(refused.value)


def never(batch_size: int) -> None:
    pytest.fail(f"size {batch_size} is tried")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (DeepSpeedStrategy(stage=3), "ZeRO stage 3 cannot go on after a forward that was cut short"),
        (make_strategy("ddp_fully_sharded"), "FairScale cannot go on after a backward that was cut short"),
        (ManualStrategy(parallelize=sharded), "`fully_shard` has not reduced the gradients of this window yet"),
        (
            ModelParallelStrategy(
                pipeline=Pipeline(degree=2, num_microbatches=2, split=split, loss_fn=nn.functional.mse_loss)
            ),
            "a stage of a pipeline computes on what other ranks send",
        ),
    ],
    ids=["stage 3", "ddp_fully_sharded", "within a window of shards", "pipeline"],
)
def test_where_a_rank_cannot_run_alone_it_is_refused(strategy: Strategy, words: str) -> None:
    for sentence in run_world(2, refuse, strategy):
        assert words in sentence
        assert sentence.endswith("Find the size on one device (`devices=1`).")


def test_errors_that_are_not_of_memory_pass_through_and_a_step_is_one() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        net = nn.Linear(2, 2)
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))

        def step(size: int) -> None:
            fabric.backward(model(torch.rand(size, 2, device=fabric.device)).sum())
            optimizer.step()

        with pytest.raises(RuntimeError, match=r"`SGD.step\(\)` within `find_batch_size`, which leaves the model"):
            fabric.find_batch_size(step)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            fabric.find_batch_size(lambda size: model(torch.rand(size, 3, device=fabric.device)))
        with pytest.raises(ValueError, match="write numbers with 1 <= start <= most"):
            fabric.find_batch_size(step, start=4, most=3)

        def run_out(size: int) -> None:
            raise MemoryError

        with pytest.raises(torch.OutOfMemoryError, match="batch size 1 does not fit into the memory of 1 ranks"):
            fabric.find_batch_size(run_out, start=8)
        assert all(each.grad is None for each in model.parameters())


def refuse_gradients(world: World, strategy: Strategy) -> None:
    """Within a window, after it, and, in the last line, no longer."""
    with Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size) as fabric:
        fabric.launch()
        net = nn.Linear(2, 1)
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))

        def run(batch_size: int) -> None:
            fabric.backward(model(torch.rand(batch_size, 2, device=fabric.device)).sum())

        for window in fabric.accumulate([2, 2], 2, model):
            for size in window:
                run(size)
                with pytest.raises(ValueError, match=r"`find_batch_size` while parameters have gradients.*zero_grad"):
                    fabric.find_batch_size(run, most=2)
        optimizer.step()
        optimizer.zero_grad()
        assert fabric.find_batch_size(run, most=2) == 2


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2"])
def test_gradients_of_a_step_are_refused_until_they_are_none(name: str) -> None:
    run_world(2, refuse_gradients, make_strategy(name))


def closures(world: World) -> float:
    """Rank 1 runs out of memory before each backward with a weight; then all step by a closure without one."""
    with Fabric(accelerator="cpu", strategy="ddp", devices=world.size, timeout_seconds=30) as fabric:
        fabric.launch()
        net = nn.Linear(4, 1)
        model, optimizer = fabric.setup(net, LBFGS(net.parameters(), max_iter=2))

        def run(batch_size: int) -> None:
            loss = model(torch.ones(batch_size, 4)).sum()
            if fabric.global_rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            fabric.backward(loss, weight=batch_size)

        with pytest.raises(torch.OutOfMemoryError, match="batch size 1 does not fit"):
            fabric.find_batch_size(run, start=1, most=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            fabric.backward(loss)
            return loss

        return float(optimizer.step(closure))


def test_weights_of_a_trial_that_one_rank_has_not_seen_do_not_count_afterwards() -> None:
    one, other = run_world(2, closures)
    assert one == other
