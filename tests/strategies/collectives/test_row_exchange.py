"""Rows that go to ranks of one's choice, over threads and over processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import run_threads
from torch import Tensor
from worlds import run_world

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.collectives.row_exchange import Route
from fabric.strategies.collectives.single import SingleDeviceCollective


def on_torch(world: World, body: Callable[..., Any], *args: Any) -> Any:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=20)
    collective.setup()
    result = body(collective, *args)
    collective.teardown()
    return result


def make_owners(seed: int, size: int) -> list[Tensor]:
    """For each rank as many rows as it likes, one rank none; nobody sends to the last rank."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (size,), generator=generator).tolist()
    lengths[seed % size] = 0 if size > 1 else lengths[0]
    return [torch.randint(max(size - 1, 1), (length,), generator=generator) for length in lengths]


def double_at_the_owner(collective: Collective, seed: int) -> None:
    """Each owner multiplies what it got by its rank plus 2; the answers, and the gradients of gradients, are known."""
    owner = make_owners(seed, collective.size)[collective.rank]
    route = Route(collective, owner)
    names = torch.stack([torch.full_like(owner, collective.rank), torch.arange(len(owner))], dim=1)
    arrived = route.send(names)
    expected = [
        [src, row]
        for src, owners in enumerate(make_owners(seed, collective.size))
        for row, dst in enumerate(owners.tolist())
        if dst == collective.rank
    ]
    assert arrived.dtype == torch.int64
    assert arrived.tolist() == expected
    assert torch.equal(route.send_back(arrived), names)

    x = torch.arange(3.0 * len(owner), dtype=torch.float64).view(-1, 3) + collective.rank
    x.requires_grad_()
    factor = torch.tensor(collective.rank + 2.0, dtype=torch.float64, requires_grad=True)
    answers = route.send_back(route.send(x).square() * factor)
    factor_of_owner = (owner + 2.0).double()[:, None]
    torch.testing.assert_close(answers, x.square() * factor_of_owner)
    (slope,) = torch.autograd.grad(answers.sum(), x, create_graph=True)
    torch.testing.assert_close(slope, 2 * x * factor_of_owner)
    (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    torch.testing.assert_close(curve, (2 * factor_of_owner).expand_as(x))
    (mine,) = torch.autograd.grad(answers.sum(), factor)
    squares = [  # of the rows that others sent here
        (torch.arange(3.0 * len(owners), dtype=torch.float64).view(-1, 3) + src)[owners == collective.rank].square()
        for src, owners in enumerate(make_owners(seed, collective.size))
    ]
    torch.testing.assert_close(mine, torch.cat(squares).sum())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_reach_their_owners_and_answers_and_gradients_come_back(size: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    run_threads(size, lambda collective: double_at_the_owner(collective, seed))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_rows_reach_their_owners_in_other_processes(size: int) -> None:
    run_world(size, on_torch, double_at_the_owner, random.randrange(2**31))


def send_nothing(collective: Collective) -> None:
    x = torch.ones(0, 3, requires_grad=True)
    route = Route(collective, torch.empty(0, dtype=torch.long))
    answers = route.send_back(route.send(x))
    assert answers.shape == (0, 3)
    answers.sum().backward()
    assert x.grad is not None


def test_ranks_may_have_no_rows() -> None:
    run_threads(3, send_nothing)


@pytest.mark.parametrize(
    ("owner", "sentence"),
    [
        (torch.tensor([0, 1]), r"with owners from 0 to 1: the collective has ranks from 0 to 0\."),
        (torch.tensor([-1]), r"with owners from -1 to -1: the collective has ranks from 0 to 0\."),
        (torch.tensor([[0]]), r"of shape \(1, 1\) and dtype torch.int64: pass one integer, a rank, for each row\."),
        (torch.tensor([0.0]), r"of shape \(1,\) and dtype torch.float32: pass one integer"),
    ],
)
def test_owners_that_are_not_ranks_raise(owner: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Route(SingleDeviceCollective(), owner)


def test_an_owner_that_is_no_rank_raises_on_all_ranks() -> None:
    def route_past_the_end(collective: Collective) -> str:
        with pytest.raises(ValueError, match="the collective has ranks from 0 to 2") as raised:
            Route(collective, torch.tensor([0, 2 + collective.rank % 2]))
        return str(raised.value)

    words = run_threads(3, route_past_the_end)
    assert ["from 0 to 3:" in words[1], "on rank 1:" in words[0], "on rank 1:" in words[2]] == [True] * 3


def test_a_route_raises_for_another_number_of_rows() -> None:
    route = Route(SingleDeviceCollective(), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"`Route.send` of a tensor of shape \(3,\): this rank has 2 rows to send\."):
        route.send(torch.ones(3))
    with pytest.raises(ValueError, match=r"`Route.send_back` of a tensor of shape \(\): this rank has 2 rows to send"):
        route.send_back(torch.ones(()))
