"""The collective over Horovod keeps the contract of all collectives, and no call of it waits for ever."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from test_collective import BODIES, POINT_TO_POINT, SUBGROUPS, Body, check_a_forked_process_is_no_rank, run_bodies
from worlds import run_world

from fabric.launchers.world import World
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.horovod.collective import OF_ALL_RANKS, HorovodCollective

pytestmark = pytest.mark.slow


def opened(world: World, timeout_seconds: float = 20.0) -> HorovodCollective:
    collective = HorovodCollective(world, timeout_seconds=timeout_seconds)
    collective.setup()
    return collective


def keep_contract(world: World, seed: int) -> dict[str, str]:
    collective = opened(world)
    failures = run_bodies(collective, seed)
    collective.teardown()
    collective.teardown()
    return failures


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} ranks".format)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_world(request.param, keep_contract, random.randrange(2**32))


@pytest.mark.parametrize("body", [*BODIES, *SUBGROUPS], ids=lambda body: body.__name__)
def test_the_collective_over_horovod_keeps_the_contract(failures: list[dict[str, str]], body: Body) -> None:
    of_body = [of_rank[body.__name__] for of_rank in failures if body.__name__ in of_rank]
    assert not of_body, "\n".join(of_body)


@pytest.mark.parametrize("body", POINT_TO_POINT, ids=lambda body: body.__name__)
def test_what_horovod_does_not_have_is_refused_on_every_rank(failures: list[dict[str, str]], body: Body) -> None:
    for of_rank in failures if len(failures) > 1 else ():
        assert OF_ALL_RANKS in of_rank[body.__name__]


def forked_from_a_rank(world: World) -> None:
    collective = opened(world)
    check_a_forked_process_is_no_rank(collective)
    collective.teardown()


def test_a_collective_in_a_forked_process_raises() -> None:
    run_world(2, forked_from_a_rank)


def dtypes_that_horovod_does_not_have(world: World) -> dict[str, Any]:
    collective = opened(world)
    generator = torch.Generator().manual_seed(5)
    halves = torch.randn(2, 1000, generator=generator).to(torch.bfloat16)
    bytes_ = torch.tensor([200, 3], dtype=torch.uint8)
    signs = torch.tensor([-100, 100], dtype=torch.int8)
    found = {
        "bf16 sum": torch.equal(collective.all_reduce(halves[world.rank]), halves.sum(0)),
        "bf16 mean": torch.equal(collective.all_reduce(halves[world.rank], "mean"), halves.mean(0)),
        "uint8 sum": collective.all_reduce(bytes_).tolist(),
        "uint8 max": collective.all_reduce(bytes_ + world.rank, "max").tolist(),
        "int8 sum": collective.all_reduce(signs).tolist(),
        "int64 sum": collective.all_reduce(torch.tensor(2**62)).item(),
    }
    collective.teardown()
    return found


def test_dtypes_that_horovod_cannot_reduce_give_the_numbers_of_torch() -> None:
    for found in run_world(2, dtypes_that_horovod_does_not_have):
        assert found == {
            "bf16 sum": True,
            "bf16 mean": True,
            "uint8 sum": [144, 6],
            "uint8 max": [201, 4],
            "int8 sum": [56, -56],
            "int64 sum": -(2**63),
        }


def call_differently(world: World) -> list[str]:
    collective, messages = opened(world), []
    mine = torch.ones(2 + world.rank)
    for call in (
        lambda: collective.all_reduce(mine),
        lambda: collective.all_gather(mine),
        lambda: collective.all_reduce(torch.ones(2), "min" if world.rank else "max"),
        lambda: collective.broadcast(torch.ones(2), world.rank),
        lambda: collective.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[world.rank])),
        lambda: collective.broadcast(torch.ones(2)) if world.rank else collective.all_reduce(torch.ones(2)),
    ):
        with pytest.raises(CollectiveError) as raised:
            call()
        messages.append(str(raised.value))
    assert collective.all_reduce(torch.tensor(1)).item() == world.size  # they agree again
    collective.teardown()
    return messages


def test_ranks_that_make_different_calls_raise_with_the_difference() -> None:
    start = time.monotonic()
    words = [
        "Mismatched ALLREDUCE tensor shapes",
        "Mismatched ALLGATHER tensor shapes",
        "Mismatched reduction operation",
        "Mismatched BROADCAST root ranks",
        "Mismatched data types",
    ]
    for rank, (*messages, kinds) in enumerate(run_world(2, call_differently)):
        for sentence, part in zip(messages, words, strict=True):
            assert f"failed on rank {rank} of 2: {part}" in sentence
        mine, other = ("`all_reduce`", "`broadcast`")[:: 1 - 2 * rank]
        assert kinds.startswith(f"{mine} of a tensor float32 (2,) on cpu on rank {rank} of 2 is its call 5, and that ")
        assert f"that of rank {1 - rank} is {other}. Make all ranks call the same" in kinds
    assert time.monotonic() - start < 20, "they were told only when the time was over"


def one_stays_away(world: World) -> tuple[str, float]:
    collective = opened(world, timeout_seconds=1.0)
    store = collective.store()
    assert store is not None
    assert collective.all_reduce(torch.tensor(1)).item() == 3
    start, messages = time.monotonic(), ""
    if world.rank != 1:
        with pytest.raises(CollectiveError) as raised:
            collective.all_gather(torch.ones(2, 3))
        messages = str(raised.value)
        store.set(f"told/{world.rank}", "")
    store.wait(["told/0", "told/2"], timedelta(seconds=30))
    seconds = time.monotonic() - start
    collective.teardown()
    return messages, seconds


def test_a_rank_that_does_not_arrive_is_named_at_the_timeout() -> None:
    (first, seconds), _, (last, _) = run_world(3, one_stays_away)
    for rank, messages in ((0, first), (2, last)):
        assert messages.startswith(
            f"`all_gather` of a tensor float32 (2, 3) on cpu on rank {rank} of 3, its call 1, waited 1 s: "
            "ranks 0, 2 arrived, rank 1 did not arrive. "
        )
    assert 1 <= seconds < 10


def leave_early(world: World) -> str:
    collective = opened(world)
    collective.barrier()
    if world.rank == 1:
        collective.teardown()
        return ""
    with pytest.raises(CollectiveError) as raised:
        collective.all_reduce(torch.ones(1))
    collective.teardown()
    return str(raised.value)


def test_a_call_of_a_rank_whose_peer_has_left_raises() -> None:
    messages, _ = run_world(2, leave_early)
    assert "`all_reduce` of a tensor float32 (1,) on cpu failed on rank 0 of 2: Horovod has been shut down" in messages


def open_again(world: World) -> list[Any]:
    os.environ["HOROVOD_RANK"] = "the user's own"
    before = dict(os.environ)
    found: list[Any] = []
    for _ in range(3):
        collective = opened(world)
        found.append(collective.all_gather_object(world.rank))
        found.append(dict(os.environ) == before)
        with pytest.raises(CollectiveError, match=r"Horovod is initialised already, .* close the other one first"):
            HorovodCollective(world).setup()
        collective.teardown()
        with pytest.raises(CollectiveError, match=r"`all_reduce` on rank \d of 2, which has not met the other ranks"):
            collective.all_reduce(torch.ones(1))
    return found


def test_worlds_can_be_opened_one_after_another_and_leave_the_environment_unchanged() -> None:
    assert run_world(2, open_again) == [[[0, 1], True] * 3] * 2
