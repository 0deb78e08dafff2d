"""Rendezvous: ranks meet at a key-value store over TCP, under a prefix of its own for each meeting.

The store is served by a process that outlives the ranks, if there is one (fabric's supervisor, torchrun's agent). For
ranks that were started by hand or by srun, rank 0 serves it.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from fabric.launchers.rendezvous.restarts import call_roll
from fabric.launchers.rendezvous.waiting import SAY_EVERY_SECONDS, Patience
from fabric.launchers.world import Rendezvous, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

# Note [Meetings are numbered by each rank]
# A process may open several fabrics, one after another, and each is a meeting of all ranks. Every rank counts its own
# meetings in the store, so the n-th of one rank is the n-th of the others, and no key is used twice: nothing has to
# be deleted, and a fast rank cannot join a meeting that a slow one has not left yet.


def join(world: World, timeout_seconds: float, report: Callable[[str], None]) -> Store:
    """Meet all ranks of the world; returns the store under a prefix that only this meeting uses.

    Ranks: all call it; it returns once all have arrived. While it waits, one rank reports every few seconds who is
    missing. A world of one opens no port.
    Raises: TimeoutError: some rank did not arrive within `timeout_seconds`; the message names them.
    """
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    if world.size == 1 or world.rendezvous is None:
        return HashStore()
    deadline = time.monotonic() + timeout_seconds
    store = _connect(world, world.rendezvous, deadline, timeout_seconds, report)
    patience = Patience(world, deadline, timeout_seconds, report)
    if world.rendezvous.hosted and world.num_nodes > 1:  # Note [Restarts that are counted apart]
        own = PrefixStore("fabric", store)
        meeting = PrefixStore(call_roll(own, world, patience), own)
    else:
        attempt = PrefixStore(f"fabric/{world.rendezvous.attempt}", store)
        meeting = PrefixStore(f"{attempt.add(f'meetings/{world.rank}', 1)}", attempt)
    _await_everyone(meeting, world, patience)
    meeting.set_timeout(timedelta(seconds=timeout_seconds))
    return meeting


def _connect(
    world: World, at: Rendezvous, deadline: float, timeout_seconds: float, report: Callable[[str], None]
) -> TCPStore:
    """A connection to the store; on rank 0 the store itself, if no other process serves it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_seconds)
    if world.rank == 0 and not at.hosted:
        return _serve(at.address, at.port)
    _await_server(world, at, deadline, timeout_seconds, report)
    return TCPStore(at.address, at.port, is_master=False, wait_for_workers=False, timeout=timeout)


@functools.cache
def _serve(address: str, port: int) -> TCPStore:
    """The store at this address, served by this process until it ends.

    Cached: the other ranks stay connected to it, and a second meeting in this process uses the same server instead of
    a port that is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(address, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank 0 cannot serve the rendezvous at {address}:{port}: {str(error).splitlines()[0]} "
            "Set MASTER_PORT to a free port of rank 0's machine, the same on every rank."
        ) from error


def _await_server(
    world: World, at: Rendezvous, deadline: float, timeout_seconds: float, report: Callable[[str], None]
) -> None:
    """Return once something accepts connections at the address."""
    server = "the process that started the ranks" if at.hosted else "rank 0"
    next_words = time.monotonic() + SAY_EVERY_SECONDS
    pause_seconds = 0.01
    while True:
        try:
            socket.create_connection((at.address, at.port), timeout=SAY_EVERY_SECONDS).close()
            return
        except OSError as error:
            now, reason = time.monotonic(), error
        if now > deadline:
            raise TimeoutError(
                f"Rank {world.rank} of {world.size} waited {timeout_seconds:g} s for {server} at "
                f"{at.address}:{at.port}: {reason}. Check that rank 0 was started, and that MASTER_ADDR and "
                "MASTER_PORT name its machine."
            )
        if now > next_words and world.local_rank == 0:
            report(f"rank {world.rank} of {world.size} waits for {server} at {at.address}:{at.port}: {reason}")
            next_words = now + SAY_EVERY_SECONDS
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.5)


def _await_everyone(meeting: Store, world: World, patience: Patience) -> None:
    """Return once every rank has called it. The last rank sets the key that all wait for: four requests per rank."""
    meeting.set(f"arrived/{world.rank}", "")
    place = meeting.add("num_arrived", 1)
    if place == world.size:
        meeting.set("complete", "")
    patience.wait_until(meeting, "complete", lambda: _missing(meeting, world), speaks=place == 1)


def _missing(meeting: Store, world: World) -> list[int]:
    return [rank for rank in range(world.size) if not meeting.check([f"arrived/{rank}"])]
