"""Rendezvous: ranks meet at a key-value store over TCP, under a prefix of its own for each meeting.

The store is served by a process that outlives the ranks, if there is one (fabric's supervisor, torchrun's agent). For
ranks that were started by hand or by srun, rank 0 serves it.
"""

from __future__ import annotations

import functools
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, final

from fabric.launchers.world import Rendezvous, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

# Note [Meetings are numbered by each rank]
# A process may open several fabrics, one after another, and each is a meeting of all ranks. Every rank counts its own
# meetings in the store, so the n-th of one rank is the n-th of the others, and no key is used twice: nothing has to
# be deleted, and a fast rank cannot join a meeting that a slow one has not left yet.

# Note [Restarts that are counted apart]
# On several nodes each agent of torchrun counts the failures of its own ranks alone: after one failure
# TORCHELASTIC_RESTART_COUNT may be 1 here and 0 there, and the one store of all agents still holds what earlier ranks
# wrote into it. (`init_process_group` of torch 2.13 then finds the addresses of dead ranks, and fails once more.) So
# rank 0 gives the meeting a new name, and sends it to every rank that has registered. A rank that has died since does
# not use it; its replacement registers again, and receives the name.

SAY_EVERY_SECONDS = 5.0
"""The interval between two reports of missing ranks. Not measured: long enough that a normal start reports nothing."""

LATER = 0.05
"""The pause between two looks, as a fraction of the time waited so far."""
LONGEST_PAUSE_SECONDS = 0.25

PAUSE = timedelta(milliseconds=20)
"""How often rank 0 looks which ranks have registered: three requests each time, at any number of ranks."""


def join(world: World, timeout_seconds: float, report: Callable[[str], None]) -> Store:
    """Meet all ranks of the world; returns the store under a prefix that only this meeting uses.

    Ranks: all call it; it returns once all have arrived. While it waits, one rank reports every few seconds who is
    missing. A world of one opens no port.
    Raises: TimeoutError: some rank did not arrive within `timeout_seconds`; the message names them.
    """
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    if world.size == 1 or world.rendezvous is None:
        return HashStore()
    patience = Patience(world, time.monotonic() + timeout_seconds, timeout_seconds, report)
    store = _connect(world, world.rendezvous, patience)
    if world.rendezvous.hosted and world.num_nodes > 1:  # Note [Restarts that are counted apart]
        own = PrefixStore("fabric", store)
        meeting = PrefixStore(call_roll(own, world, patience), own)
    else:
        attempt = PrefixStore(f"fabric/{world.rendezvous.attempt}", store)
        meeting = PrefixStore(f"{attempt.add(f'meetings/{world.rank}', 1)}", attempt)
    _await_everyone(meeting, world, patience)
    meeting.set_timeout(timedelta(seconds=timeout_seconds))
    return meeting


def _connect(world: World, at: Rendezvous, patience: Patience) -> TCPStore:
    """A connection to the store; on rank 0 the store itself, if no other process serves it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=patience.timeout_seconds)
    if world.rank == 0 and not at.hosted:
        return _serve(at.address, at.port)
    _await_server(world, at, patience)
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


def _await_server(world: World, at: Rendezvous, patience: Patience) -> None:
    """Return once something accepts connections at the address."""
    server = "the process that started the ranks" if at.hosted else "rank 0"
    pause_seconds = 0.01
    while True:
        try:
            socket.create_connection((at.address, at.port), timeout=SAY_EVERY_SECONDS).close()
            return
        except OSError as error:
            patience.check(
                f"{server} at {at.address}:{at.port}: {error}",
                ". Check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT name its machine.",
                speaks=world.local_rank == 0,
            )
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


def call_roll(store: Store, world: World, patience: Patience) -> str:
    """The prefix of this meeting's keys, the same on all ranks of one attempt and on no other. Ranks: all call it.

    Raises: TimeoutError: some rank did not arrive; the message names it.
    """
    number = store.add(f"joins/{_life_of(world.rank)}", 1)  # the n-th meeting of a rank is the n-th of all ranks
    token = uuid.uuid4().hex
    if world.rank != 0:
        store.set(f"here/{number}/{world.rank}", token)
        return _when_called(store, token, world, patience)
    others = range(1, world.size)
    called: set[bytes] = set()
    while not store.check([f"{token}/arrived/{rank}" for rank in others]):
        here = [f"here/{number}/{rank}" for rank in others]
        all_here = store.check(here)
        for one in set(store.multi_get(here)) - called if all_here else ():
            store.set(f"call/{one.decode()}", token)
            called.add(one)
        if patience.turn() <= PAUSE:
            sign = f"{token}/arrived" if all_here else f"here/{number}"
            patience.wait_for([rank for rank in others if not store.check([f"{sign}/{rank}"])], speaks=True)
        time.sleep(PAUSE.total_seconds())
    return token


def _when_called(store: Store, token: str, world: World, patience: Patience) -> str:
    from torch.distributed import DistStoreError

    while True:
        try:
            store.wait([f"call/{token}"], patience.turn())
            return store.get(f"call/{token}").decode()
        except DistStoreError:
            patience.wait_for([0], speaks=world.local_rank == 0)


@functools.cache
def _life_of(rank: int) -> str:
    """A token for this rank of this process. By rank, because ranks may be threads, and two threads that call a cached
    function at the same time get two results."""
    return uuid.uuid4().hex


@final
class Patience:
    """How one rank waits in one meeting, until `deadline`; `timeout_seconds`: of the whole meeting."""

    def __init__(self, world: World, deadline: float, timeout_seconds: float, report: Callable[[str], None]) -> None:
        self._who, self.timeout_seconds, self._report = f"rank {world.rank} of {world.size}", timeout_seconds, report
        self._deadline = deadline
        self._next_words = time.monotonic() + SAY_EVERY_SECONDS

    def wait_until(self, store: Store, key: str, missing: Callable[[], Sequence[int]], *, speaks: bool) -> None:
        """Return once the key is set. Raises: TimeoutError: it is not; it names the `missing` ranks.

        One rank `speaks`: it looks repeatedly, at intervals that grow with the time waited. The others send one
        blocking request, because torch logs socket warnings for a wait that is repeated.
        """
        from torch.distributed import DistStoreError

        started = time.monotonic()
        while speaks and not store.check([key]):
            self.wait_for(missing() if time.monotonic() > min(self._next_words, self._deadline) else (), speaks=True)
            time.sleep(min(max((time.monotonic() - started) * LATER, 0.001), LONGEST_PAUSE_SECONDS))
        while True:
            try:
                store.wait([key], timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
                return
            except DistStoreError:
                self.wait_for(missing(), speaks=False)

    def turn(self) -> timedelta:
        """The time to wait before `wait_for` is called again."""
        return timedelta(seconds=max(min(self._deadline, self._next_words) - time.monotonic(), 0.001))

    def wait_for(self, missing: Sequence[int], *, speaks: bool) -> None:
        """Called while ranks are missing. `speaks`: whether this rank reports them. Raises: TimeoutError."""
        self.check(
            f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}",
            ", which did not arrive. Check that every rank was started, and that all of them reach `launch`.",
            speaks=speaks,
        )

    def check(self, awaited: str, advice: str, *, speaks: bool) -> None:
        """Called while something is awaited. Raises: TimeoutError."""
        now = time.monotonic()
        if now > self._deadline:
            raise TimeoutError(f"{self._who.capitalize()} waited {self.timeout_seconds:g} s for {awaited}{advice}")
        if now > self._next_words:
            self._next_words = now + SAY_EVERY_SECONDS
            if speaks:
                self._report(f"{self._who} waits for {awaited}")
