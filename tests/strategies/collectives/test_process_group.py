"""What only the collective over `torch.distributed` meets: groups that others made, ranks that leave or are late."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.collectives.objects import _pickled
from fabric.strategies.collectives.process_group import _KEPT, TorchCollective


def gloo(world: World, timeout_seconds: float = 20) -> TorchCollective:
    return TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=timeout_seconds)


def open_three_in_a_row(world: World) -> list[int]:
    sums = []
    for _ in range(3):
        collective = gloo(world)
        collective.setup()
        sums.append(int(collective.all_reduce(torch.tensor(world.rank + 1))))
        collective.teardown()
        assert not dist.is_initialized()
    return sums


@pytest.mark.parametrize("size", [1, 2])
def test_collectives_open_and_close_one_after_another_in_a_process(size: int) -> None:
    assert run_world(size, open_three_in_a_row) == [[sum(range(1, size + 1))] * 3] * size


def end_while_a_worker_runs(world: World) -> int:
    """One rank keeps a worker, as `persistent_workers=True` does."""
    collective = gloo(world)
    collective.setup()
    batches = iter(DataLoader(range(1000), num_workers=1 - world.rank))  # type: ignore[arg-type]
    next(batches)
    for _ in range(30):
        part = collective.split([0, 1])
        assert part is not None
        part.barrier()
        collective.teardown()
        collective.setup()
    assert len(_KEPT) == (90 if world.rank == 0 else 0)  # all, those for gradients, and those of the split
    del batches
    collective.teardown()
    return len(_KEPT)


def test_a_process_whose_worker_runs_ends_its_groups_without_an_abort() -> None:
    assert run_world(2, end_while_a_worker_runs) == [0, 0]


_LEFT: list[Iterator[Any]] = []


def train_and_leave_a_worker(fabric: Fabric) -> int:
    module = nn.Linear(4, 4)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    part = fabric.collective.split([0, 1])
    assert part is not None
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        part.barrier()
    if fabric.is_global_zero:
        batches = iter(DataLoader(range(1000), num_workers=1))  # type: ignore[arg-type]
        next(batches)
        _LEFT.append(batches)
    fabric.barrier()
    return fabric.global_rank


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_of_which_one_leaves_a_worker_end() -> None:
    for _ in range(12):  # an abort came in every second launch
        fabric = Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=2, launcher="forkserver")
        assert fabric.launch(train_and_leave_a_worker) == 0


def use_a_group_that_is_there(world: World) -> None:
    first, second = gloo(world), gloo(world)
    first.setup()
    second.setup()
    part = second.split([1])
    assert second.all_gather_object(world.rank) == [0, 1]
    second.teardown()
    assert (part is not None) == (world.rank == 1)
    assert dist.is_initialized()
    assert first.all_gather_object(world.rank) == [0, 1]
    first.teardown()
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_used_and_left_there() -> None:
    run_world(2, use_a_group_that_is_there)


def find_another_group(world: World) -> list[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    messages = []
    for collective in (gloo(world), TorchCollective(world, "nccl", device=torch.device("cuda", 0))):
        with pytest.raises(CollectiveError) as info:
            collective.setup()
        messages.append(str(info.value))
        collective.teardown()
        assert dist.is_initialized()
    dist.destroy_process_group()
    return messages


def test_a_group_of_another_size_is_refused() -> None:
    size, _ = run_world(2, find_another_group)[1]
    assert "A process group exists already: rank 0 of 1 over" in size
    assert "This fabric is rank 1 of 2 and uses 'gloo'. Leave `init_process_group` to the fabric" in size


def test_a_group_over_another_backend_is_refused() -> None:
    _, backend = run_world(1, find_another_group_of_one)[0]
    assert "rank 0 of 1 over 'cpu:gloo,cuda:gloo'" in backend
    assert "`torch.distributed.init_process_group('cpu:gloo,cuda:nccl', ...)` with the same ranks" in backend


def find_another_group_of_one(world: World) -> list[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    collective = gloo(world)
    collective.setup()
    collective.teardown()
    other = TorchCollective(world, "nccl", device=torch.device("cuda", 0))
    with pytest.raises(CollectiveError) as info:
        other.setup()
    dist.destroy_process_group()
    return ["", str(info.value)]


def ask_for_an_unknown_backend(world: World) -> str:
    collective = TorchCollective(world, "carrier-pigeon", device=torch.device("cpu"), timeout_seconds=20)
    with pytest.raises(CollectiveError) as info:
        collective.setup()
    collective.teardown()
    return str(info.value)


def test_a_backend_that_torch_does_not_know_is_an_error_with_its_name() -> None:
    for rank, message in enumerate(run_world(2, ask_for_an_unknown_backend)):
        assert f"`init_process_group('carrier-pigeon')` failed on rank {rank} of 2" in message


def test_collectives_raise_before_setup_and_after_teardown() -> None:
    collective = gloo(World())
    words = r"`all_reduce` on rank 0 of 1, which is not connected to the other ranks: call `setup\(\)` first"
    with pytest.raises(CollectiveError, match=words):
        collective.all_reduce(torch.ones(1))
    collective.setup()
    collective.all_reduce(torch.ones(1))
    collective.teardown()
    collective.teardown()
    with pytest.raises(CollectiveError, match=words):
        collective.all_reduce(torch.ones(1))
    with pytest.raises(CollectiveError, match="`store` on rank 0 of 1, which is not connected"):
        collective.store()


def leave_early(world: World) -> str:
    collective = gloo(world, timeout_seconds=100)
    collective.setup()
    collective.barrier()
    if world.rank == 1:
        collective.teardown()
        return ""

    def talk() -> None:
        while True:  # a rank that leaves is noticed by the next message, or the one after
            collective.all_reduce(torch.ones(2, 3))

    with pytest.raises(CollectiveError) as info:
        talk()
    assert info.value.rank == 0
    assert isinstance(info.value.__cause__, RuntimeError)
    collective.teardown()
    return str(info.value)


def test_a_rank_that_leaves_is_an_error_with_the_call_and_the_cause() -> None:
    message = run_world(2, leave_early)[0]
    assert (
        "`all_reduce` of a tensor float32 (2, 3) on cpu failed on rank 0 of 2 (a call waits 100 s for the other"
        in message
    )
    assert "Check the output of the other ranks: one of them ended, was late, or called something else." in message


def come_late(world: World) -> str:
    collective = gloo(world, timeout_seconds=1)
    collective.setup()
    store = collective.store()
    assert store is not None
    message = ""
    if world.rank == 0:
        with pytest.raises(CollectiveError) as info:
            collective.barrier()
        message = str(info.value)
        store.set("failed", "")
    else:
        while not store.check(["failed"]):
            threading.Event().wait(0.01)
    collective.teardown()
    return message


@pytest.mark.slow
def test_a_rank_that_is_late_is_an_error_after_the_timeout() -> None:
    message = run_world(2, come_late)[0]
    assert "`barrier` failed on rank 0 of 2 (a call waits 1 s for the other ranks): " in message
    assert "imed out" in message


def test_tensors_in_a_broadcast_object_are_not_pickled() -> None:
    tensors: list[torch.Tensor] = []
    nest = {"batch": [torch.zeros(100_000)], "deep": Holder(torch.zeros(100_000)), "word": "x"}
    pickled = _pickled(nest, "broadcast", tensors)
    assert len(pickled) < 1000
    assert len(tensors) == 2


class Holder:
    """An object of the user's that holds a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def refuse_to_be_read(world: World) -> str:
    collective = gloo(world)
    collective.setup()
    with pytest.raises((ZeroDivisionError, CollectiveError)) as info:
        collective.all_gather_object(Unreadable() if world.rank == 0 else 1)
    collective.teardown()
    return type(info.value).__name__


class Unreadable:
    """Pickles, but cannot be read."""

    def __reduce__(self) -> tuple[Callable[[int, int], object], tuple[int, int]]:
        return divmod, (1, 0)


def test_an_object_that_cannot_be_read_raises_its_own_error() -> None:
    assert run_world(2, refuse_to_be_read) == ["ZeroDivisionError"] * 2
    assert pickle.dumps(Unreadable())


@pytest.mark.gpu
def test_one_rank_on_an_accelerator_talks_over_its_backend_and_over_the_cpu() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    collective = TorchCollective(World(), "nccl", device=torch.device(device.type, 0))
    collective.setup()
    there = torch.arange(6.0, device=device.type).reshape(1, 6)
    assert collective.all_reduce(there, "mean").device.type == device.type
    assert collective.all_gather(there.bfloat16()).shape == (1, 1, 6)
    assert collective.reduce_scatter(there).tolist() == there[0].tolist()
    assert collective.all_to_all(there).tolist() == there.tolist()
    assert collective.broadcast(there).tolist() == there.tolist()
    assert collective.all_reduce(torch.tensor(2)).device.type == "cpu"
    assert collective.broadcast_object({"there": there})["there"] is there
    assert collective.reduce_boolean_decision(True)
    collective.barrier()
    collective.teardown()
