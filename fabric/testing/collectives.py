"""The contract of every collective, with numbers of every rank drawn from the seed.

Each rank also draws what the others pass, and so knows the expected result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fabric.strategies.collectives.collective import HOST_DEVICES, Collective, CollectiveError, ReduceOp
from fabric.testing.drawn import Trial
from fabric.testing.plain import Loop
from fabric.testing.run import Outcome

_REDUCTIONS: tuple[ReduceOp, ...] = ("sum", "mean", "min", "max", "product")


def run_operations(loop: Loop, trial: Trial) -> Outcome:
    """Run every operation once. Raises AssertionError if a result is wrong."""
    collective = loop.collective
    every = range(collective.size)
    shape = tuple(trial.draw("shape").randint(0, 4) for _ in range(trial.draw("ndim").randrange(4)))

    def drawn(rank: int, *more: int) -> Tensor:
        numbers = torch.randint(1, 4, (*more, *shape), generator=trial.generator(f"rank {rank}"))
        return loop.to_device(numbers.to(torch.float32))

    mine, stacked = drawn(collective.rank), torch.stack([drawn(rank) for rank in every])
    for name, pieces in {
        "all_gather": (collective.all_gather(mine), stacked),
        **{f"all_reduce {op}": (collective.all_reduce(mine, op), _reduced(stacked, op)) for op in _REDUCTIONS},
        **{f"broadcast from {rank}": (collective.broadcast(mine, rank), stacked[rank]) for rank in every},
    }.items():
        _equal(name, *pieces)
    slices = torch.stack([drawn(rank, collective.size) for rank in every])
    own = drawn(collective.rank, collective.size)
    _equal("reduce_scatter", collective.reduce_scatter(own, "sum"), slices.sum(dim=0)[collective.rank])
    _equal("all_to_all", collective.all_to_all(own), slices[:, collective.rank])
    _equal("what was passed", own, slices[collective.rank])
    if collective.size > 1:
        _differences(loop)
    _objects(collective)
    for voters in (0, 1, collective.size):
        decision = collective.rank < voters
        assert collective.reduce_boolean_decision(decision) is (voters == collective.size)
        assert collective.reduce_boolean_decision(decision, require_all=False) is (voters > 0)
    collective.barrier()
    # Last, because some backends have none of these.
    _parts(collective, mine)
    if collective.size > 1:
        _equal("recv", _around(collective, mine), stacked[collective.rank - 1])
    return Outcome(losses=[])


def _reduced(stacked: Tensor, op: ReduceOp) -> Tensor:
    return {
        "sum": stacked.sum(dim=0),
        "mean": stacked.mean(dim=0),
        "min": stacked.amin(dim=0),
        "max": stacked.amax(dim=0),
        "product": stacked.prod(dim=0),
    }[op]


def _around(collective: Collective, mine: Tensor) -> Tensor:
    """Send and receive around a ring; rank 0 sends first, so that there is no deadlock."""
    after, before = (collective.rank + 1) % collective.size, (collective.rank - 1) % collective.size
    if collective.rank == 0:
        collective.send(mine, after)
        return collective.recv(mine, before)
    got = collective.recv(mine, before)
    collective.send(mine, after)
    return got


def _differences(loop: Loop) -> None:
    """A single tensor that differs between ranks raises on all of them, and the next call works.

    Tensors on an accelerator are compared without waiting, so that the error comes in the next call: here they stay on
    the CPU.
    """
    rank, size = loop.collective.rank, loop.collective.size
    ones = torch.ones(3, 4)
    moved = loop.to_device(ones)
    ones = moved if moved.device.type in HOST_DEVICES else ones
    calls: dict[str, Callable[[], Any]] = {
        "all_gather of shapes": lambda: loop.all_gather(ones if rank else ones.T),
        "all_gather of lengths": lambda: loop.all_gather(ones[: 3 - (rank == 0)]),
        "all_reduce of shapes": lambda: loop.all_reduce(ones if rank else ones.T),
        "all_reduce of dtypes": lambda: loop.all_reduce(ones if rank else ones.int(), reduce_op="sum"),
        "all_reduce of one number": lambda: loop.all_reduce(torch.tensor(1.0) if rank else torch.ones(2)),
    }
    for name, call in calls.items():
        message = ""
        try:
            call()
        except CollectiveError as error:
            message = str(error)
        assert "did not make the same call" in message, (
            f"{name} that differ between ranks: {message or 'nothing was raised'}"
        )
    for one in (torch.tensor(float(rank)), loop.to_device(torch.tensor(float(rank)))):
        _equal("all_reduce of one number", loop.all_reduce(one), one.new_tensor((size - 1) / 2))


def _objects(collective: Collective) -> None:
    mine: dict[str, Any] = {"rank": collective.rank, "tensor": torch.full((2,), float(collective.rank))}
    for rank, other in enumerate(collective.all_gather_object(mine)):
        assert other["rank"] == rank
        assert other["tensor"].tolist() == [float(rank)] * 2
    last = collective.size - 1
    assert collective.broadcast_object(mine, last)["rank"] == last


def _parts(collective: Collective, mine: Tensor) -> None:
    """The first half of the ranks split off a collective."""
    some = range((collective.size + 1) // 2)
    part = collective.split(list(some))
    assert (part is not None) == (collective.rank in some)
    if part is not None:
        assert (part.rank, part.size) == (collective.rank, len(some))
        assert part.all_gather(mine).shape == (len(some), *mine.shape)


def _equal(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape, f"{name} returns the shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{name} returns {got.dtype}, not {expected.dtype}"
    assert got.tolist() == expected.tolist(), f"{name} returns {got.tolist()}, not {expected.tolist()}"
