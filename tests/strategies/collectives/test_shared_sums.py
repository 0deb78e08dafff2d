"""Sums through shared memory: those of the collective, whoever is late, and wherever a rank ends."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fakes import run_threads
from worlds import run_world

from fabric.launchers.launcher import WorkerError
from fabric.launchers.world import World
from fabric.strategies.collectives import shared_sums as module
from fabric.strategies.collectives.collective import Collective, CollectiveError
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.collectives.shared_sums import shared_float_sum, shared_sums


def on_collective(world: World, body: Any, *args: Any) -> Any:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"), timeout_seconds=60)
    collective.setup()
    try:
        return body(collective, *args)
    finally:
        collective.teardown()


@contextmanager
def counted(collective: Any) -> Iterator[list[Any]]:
    """The sums that the collective computes."""
    calls: list[Any] = []
    start = collective.start_add_numbers
    collective.start_add_numbers = lambda numbers: (calls.append(numbers), start(numbers))[1]
    yield calls
    collective.start_add_numbers = start


def add_many(collective: Collective) -> tuple[bool, int]:
    add, rng = shared_sums(collective), random.Random(0)
    assert add is not None
    module._MADE[collective]._tag = module._NUM_TAGS - 1000  # type: ignore[union-attr]  # they begin again
    is_right = True
    with counted(collective) as calls:
        for _ in range(2000):
            count = rng.randint(1, 4)
            given = [[rng.randrange(-(2**39), 2**39) for _ in range(count)] for _ in range(collective.size)]
            is_right &= add(given[collective.rank]) == [sum(each) for each in zip(*given, strict=True)]
    return is_right, len(calls)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_those_of_all_ranks_and_nothing_is_sent(size: int) -> None:
    assert run_world(size, on_collective, add_many) == [(True, 0)] * size


def add_late(collective: Collective) -> tuple[list[Any], int]:
    """Ranks that are late by up to twice as long as the others wait."""
    module._PATIENCE_SECONDS, module._GRACE_SECONDS = 0.01, 0.005
    add, rng = shared_sums(collective), random.Random(collective.rank)
    assert add is not None
    sums = []
    with counted(collective) as calls:
        for number in range(150):
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.02))
            sums.append([int(each) for each in add([number, -1])])
    return sums, len(calls)


def test_a_late_rank_gets_the_same_sums_by_the_collective() -> None:
    found = run_world(3, on_collective, add_late)
    for sums, num_sent in found:
        assert sums == [[3 * number, -3] for number in range(150)]
        assert 10 < num_sent < 140
        assert num_sent == found[0][1]


def add_floats(collective: Collective, is_late: bool) -> tuple[list[float], list[float], int]:
    """Sums in two steps, of which some are begun on all ranks and not asked for: found, expected, and sent messages."""
    if is_late:
        module._PATIENCE_SECONDS, module._GRACE_SECONDS = 0.01, 0.005
    start, same, own = shared_float_sum(collective), random.Random(1), random.Random(collective.rank)
    assert start is not None
    found, expected = [], []
    with counted(collective) as calls:
        for _ in range(150 if is_late else 1000):
            numbers = [same.uniform(-1, 1) * 10 ** same.randint(-300, 300) for _ in range(collective.size)]
            if is_late and own.random() < 0.3:
                time.sleep(own.uniform(0, 0.02))
            place = same.randrange(2**32)
            is_astray = same.random() < 0.2
            finish = start(numbers[collective.rank], (place + (is_astray and collective.rank == 1)) % 2**32)
            if same.random() < 0.7:
                total, is_same = finish()
                found.append(total)
                expected.append(sum(numbers))
                assert not (is_same and is_astray)
                assert is_same or is_astray
    return found, expected, len(calls)


def test_float_sums_are_those_of_all_ranks_whether_or_not_the_one_before_was_asked_for() -> None:
    for found, expected, num_sent in run_world(3, on_collective, add_floats, False):
        assert found == expected
        assert num_sent == 0
    for found, expected, num_sent in run_world(3, on_collective, add_floats, True):
        assert found == pytest.approx(expected, rel=1e-12)
        assert 10 < num_sent < 140


def die_while_deciding(collective: Collective) -> None:
    module._GRACE_SECONDS = 60.0 if collective.rank == 1 else 0.05
    add: Any = shared_sums(collective)
    if collective.rank == 0:
        time.sleep(2)
    else:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(3))  # in the grace: it holds the lock
        signal.setitimer(signal.ITIMER_REAL, 1.5)
    add([1])


def test_a_rank_that_ends_while_it_decides_ends_the_others() -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="exit code 3"):
        run_world(2, on_collective, die_while_deciding)
    assert time.monotonic() - begun < 30


def leave(collective: Collective) -> str:
    add: Any = shared_sums(collective)
    add([1])
    if collective.rank == 1:
        return ""
    with pytest.raises(CollectiveError, match=r"`all_reduce` of a tensor float64 \(1,\) .* failed on rank 0 of 2"):
        add([1])
    return "raised"


def test_a_rank_that_leaves_is_an_error_on_the_others() -> None:
    assert run_world(2, on_collective, leave) == ["raised", ""]


def test_threads_and_single_ranks_have_no_shared_memory() -> None:
    assert run_threads(3, lambda collective: shared_sums(collective) is None) == [True] * 3
    assert run_threads(1, lambda collective: shared_sums(collective) is None) == [True]


def without_descriptors(collective: Collective) -> bool:
    """Rank 1 cannot open the memory, as on another machine."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if collective.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    add = shared_sums(collective)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return add is None


def test_ranks_that_cannot_share_memory_use_their_collective() -> None:
    assert run_world(2, on_collective, without_descriptors) == [True, True]
    with open("/dev/null") as other:  # of another program that has the same number there, on another machine
        assert module._find(os.getpid(), other.fileno(), "/memfd:fabric-1 (deleted)") is None
