"""Collectives that one rank alone calls: each is answered as if all ranks were this one, and nothing is sent."""

import threading
import warnings

import torch
import torch.distributed as dist
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.collectives.answered_alone import answered_alone
from fabric.strategies.collectives.torch_calls_check import compare_collectives


def call_on_one_rank(world: World) -> float:
    with Fabric(accelerator="cpu", strategy="ddp", devices=world.size) as fabric:
        fabric.launch()
        group = fabric.collective.process_group
        assert group is not None
        in_a_thread = torch.tensor(1.0 + world.rank)
        thread = threading.Thread(target=dist.all_reduce, args=(in_a_thread,))
        with warnings.catch_warnings(), compare_collectives():
            warnings.simplefilter("error")
            with answered_alone(group):
                if fabric.is_global_zero:
                    call_each()
                thread.start()
                thread.join()
        return in_a_thread.item()


def call_each() -> None:
    mine, pairs = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    summed, largest, received, found = mine.clone(), mine.clone(), mine.clone(), torch.empty(2, 2)
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.broadcast(received, src=1)
    dist.send(mine, 1)
    assert (summed.tolist(), largest.tolist(), received.tolist()) == ([2, 4], [1, 2], [1, 2])
    listed = [torch.empty(2), torch.empty(2)]
    dist.all_gather(listed, mine)
    dist.gather(mine, [found[0], found[1]], dst=0)
    assert [each.tolist() for each in listed] == found.tolist() == [[1, 2], [1, 2]]
    dist.reduce_scatter(found[0], list(pairs))
    dist.scatter(found[1], list(pairs), src=0)
    assert found.tolist() == [[2, 4], [1, 2]]
    dist.all_to_all_single(found, pairs)
    assert found.tolist() == pairs.tolist()
    dist.all_to_all_single(found[:1], mine.view(2, 1)[:, [0, 0]], [0, 1], [1, 1])
    dist.recv(received, src=1)
    assert (found[0].tolist(), received.tolist()) == ([0, 0], [0, 0])


def test_one_rank_is_answered_at_once_and_calls_of_its_threads_are_sent() -> None:
    assert run_world(2, call_on_one_rank) == [3, 3]
