"""Told on one rank, all ranks stop at the same step."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
from worlds import run_world

from fabric.launchers.rendezvous.join import join
from fabric.launchers.world import World
from fabric.loop.stop import StopRequest


def steps_until_stopped(world: World, chosen: int, number: int | None, after: int) -> int:
    """Steps that wait for each other through the store, as a training step does through its collective."""
    store = join(world, 60.0, print)
    stop = StopRequest(world, print)
    noise = random.Random(world.rank)
    step = 0
    while not stop.reached():
        step += 1
        store.add(f"step/{step}", 1)
        if step == after and world.rank == chosen:
            stop.request() if number is None else os.kill(os.getpid(), number)
        if noise.random() < 0.2:
            time.sleep(0.002)  # ranks are never quite together
        while store.add(f"step/{step}", 0) < world.size:
            pass
    stop.close()
    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [None, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=["request", "SIGTERM", "SIGUSR1", "SIGINT"]
)
@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_stop_at_the_same_step(size: int, number: int | None) -> None:
    after = random.randrange(1, 30)
    steps = run_world(size, steps_until_stopped, size - 1, number, after)
    assert len(set(steps)) == 1, steps
    assert after <= steps[0]


def test_closing_restores_signal_handlers_and_ends_the_thread() -> None:
    before = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    stop = StopRequest(World(), print)
    assert signal.getsignal(signal.SIGTERM) != before[0]
    assert not stop.reached()
    stop.close()
    assert (signal.getsignal(signal.SIGTERM), set(threading.enumerate())) == before


def test_a_second_ctrl_c_interrupts() -> None:
    stop = StopRequest(World(), print)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert stop.reached()
    stop.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_forked_child_as_if_its_rank_handled_none(number: int) -> None:
    stop = StopRequest(World(), print)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"!")  # Python forgets a signal that comes while it forks
        while True:  # Python runs the handler between two lines, and `pause` would miss a signal that came before it
            os.sched_yield()
    os.read(reader, 1)
    os.kill(child, number)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == number
    assert not stop.reached()
    stop.close()
    os.close(reader)
    os.close(writer)


def one_rank_never_asks(world: World) -> str:
    stop = StopRequest(world, print, timeout_seconds=1.0)
    if world.rank == 1:
        join(world, 30.0, print)  # meets rank 0 once that has given up
        stop.close()
        return ""
    stop.request()
    try:
        while not stop.reached():
            time.sleep(0.001)
    except Exception as error:
        return type(error).__name__ + str(error)
    finally:
        join(world, 30.0, print)
        stop.close()
    return "stopped"


@pytest.mark.slow
def test_a_rank_that_has_not_read_should_stop_yet_stops_at_its_first_read() -> None:
    assert run_world(2, one_rank_never_asks)[0] == "stopped"
