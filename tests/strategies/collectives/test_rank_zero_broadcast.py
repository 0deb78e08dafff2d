"""Rank zero runs a block before the others, and they hear of its failure."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from fakes import ThreadCollective, run_threads
from worlds import run_world

from fabric.launchers.world import Rendezvous, World
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.collectives.rank_zero_broadcast import rank_zero_first

NOWHERE = Rendezvous(address="127.0.0.1", port=1, hosted=True)


def world_of(collective: Collective, num_nodes: int = 1) -> World:
    """The world of a fake's rank, on nodes of equal size."""
    rank, local_size = collective.rank, collective.size // num_nodes
    return World(
        rank=rank,
        size=collective.size,
        local_rank=rank % local_size,
        local_size=local_size,
        node_rank=rank // local_size,
        num_nodes=num_nodes,
        rendezvous=NOWHERE if collective.size > 1 else None,
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_others_run_after_rank_zero_has_ended(size: int) -> None:
    order: list[int] = []

    def body(collective: ThreadCollective) -> list[str]:
        collective.calls.clear()
        with rank_zero_first(collective, world_of(collective)):
            order.append(collective.rank)
        return list(collective.calls)

    calls = run_threads(size, body)
    assert order[0] == 0
    assert sorted(order) == list(range(size))
    assert "split" not in calls[0]


def test_with_local_the_first_rank_of_each_node_goes_first() -> None:
    order: list[int] = []

    def body(collective: Collective) -> None:
        with rank_zero_first(collective, world_of(collective, num_nodes=2), local=True):
            order.append(collective.rank)

    run_threads(4, body)
    assert sorted(order[:2]) == [0, 2]
    assert sorted(order[2:]) == [1, 3]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("no data at /data"), KeyboardInterrupt("at the keyboard")], ids=repr
)
def test_a_failure_of_rank_zero_is_its_own_there_and_reaches_every_other_rank(error: BaseException) -> None:
    ran: list[int] = []

    def body(collective: Collective) -> str:
        expected = type(error) if collective.rank == 0 else CollectiveError

        def block() -> None:
            with rank_zero_first(collective, world_of(collective)):
                ran.append(collective.rank)
                raise error

        with pytest.raises(expected) as info:
            block()
        assert collective.all_gather_object(1) == [1] * collective.size  # and the collective still works
        return str(info.value)

    messages = run_threads(3, body)
    assert ran == [0]
    cause = f"{type(error).__name__}: {error}"
    words = f"Rank 0 failed in the block of `rank_zero_first` that it runs before the others: {cause}"
    assert messages == [str(error), words, words]


def test_a_failure_of_one_node_reaches_the_first_rank_of_another() -> None:
    def body(collective: Collective) -> str | None:
        try:
            with rank_zero_first(collective, world_of(collective, num_nodes=2), local=True):
                if collective.rank == 2:
                    raise OSError("disk of node 1")
        except (OSError, CollectiveError) as error:
            return type(error).__name__
        return None

    assert run_threads(4, body) == ["CollectiveError", "CollectiveError", "OSError", "CollectiveError"]


def fail_on_rank_zero(world: World) -> tuple[str, float]:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=100)
    collective.setup()
    start = time.monotonic()
    with pytest.raises((OSError, CollectiveError)) as info, rank_zero_first(collective, world):
        raise OSError("no space left")
    passed = time.monotonic() - start
    collective.teardown()
    return f"{type(info.value).__name__}: {info.value}", passed


def test_the_failure_of_rank_zero_reaches_other_processes_long_before_any_timeout() -> None:
    (own, _), (message, seconds) = run_world(2, fail_on_rank_zero)
    assert own == "OSError: no space left"
    assert message.endswith("that it runs before the others: OSError: no space left")
    assert seconds < 50


def test_the_world_of_a_fake_is_a_world() -> None:
    fields: list[dict[str, Any]] = run_threads(4, lambda collective: dataclasses.asdict(world_of(collective, 2)))
    assert [field["local_rank"] for field in fields] == [0, 1, 0, 1]
