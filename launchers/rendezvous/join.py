"""Rendezvous: ranks meet at a key-value store over TCP, under a prefix of its own for each meeting.

The store is served by a process that outlives the ranks, if there is one (fabric's supervisor, torchrun's agent). For
ranks that were started by hand or by srun, rank 0 serves it.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, final

from fabric.launchers.process.network import require_loopback
from fabric.launchers.world import Rendezvous, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

# Note [Meetings are numbered by each rank]
# A process may open several fabrics, one after another, and each is a meeting of all ranks. Every rank counts its own
# meetings in the store, so the n-th of one rank is the n-th of the others.

# Note [Each meeting has a name]
# The one store of all agents of torchrun still holds what earlier ranks wrote into it, and on several nodes each agent
# counts the failures of its own ranks alone: TORCHELASTIC_RESTART_COUNT may be 1 here and 0 there. So rank 0 gives each
# meeting a new name, and sends it to every rank that has registered. A rank that has died since does not use it; its
# replacement registers again, and receives the name. No key is used twice: nothing has to be deleted, and a fast rank
# cannot join a meeting that a slow one has not left yet.

SAY_EVERY_SECONDS = 5.0
"""The interval between two reports of missing ranks. Not measured: long enough that a normal start reports nothing."""

LATER = 0.05
"""The pause between two looks, as a fraction of the time waited so far."""
LONGEST_PAUSE_SECONDS = 0.25
ADVICE = ", which did not arrive. Check that every rank was started, and that all of them reach `launch`."


def join(world: World, timeout_seconds: float, report: Callable[[str], None]) -> Store:
    """Meet all ranks of the world; returns the store under a prefix that only this meeting uses.

    Ranks: all call it; it returns once all have arrived. While it waits, one rank reports every few seconds who is
    missing. A world of one opens no port.
    Raises: TimeoutError: some rank did not arrive within `timeout_seconds`; the message names them.
    """
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    if world.size == 1 or world.rendezvous is None:
        return HashStore()
    at, patience = world.rendezvous, Patience(world, timeout_seconds, report)
    # Rank 0 may serve on a port that is derived from the job's number, where it may meet a rank of another job.
    store = PrefixStore("fabric" if at.hosted else f"fabric/{at.attempt}", _connect(world, at, patience))
    _compare_worlds(store, world)
    meeting = PrefixStore(call_roll(store, world, patience), store)
    meeting.set_timeout(timedelta(seconds=timeout_seconds))
    return meeting


def _connect(world: World, at: Rendezvous, patience: Patience) -> TCPStore:
    """A connection to the store; on rank 0 the store itself, if no other process serves it.

    It connects in a thread, because torch's client waits without a limit for a server that accepts its connection and
    is silent, such as another program at a MASTER_ADDR of an earlier job.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if world.rank == 0 and not at.hosted:
        return _serve(at.port)
    server = f"{'the process that started the ranks' if at.hosted else 'rank 0'} at {at.address}:{at.port}"
    found: list[TCPStore] = []
    state: list[object] = []

    def connect() -> None:
        started = time.monotonic()
        while not found and not patience.is_over():
            try:
                socket.create_connection((at.address, at.port), timeout=SAY_EVERY_SECONDS).close()
                state[:] = ["accepts connections, and does not answer as a store of ranks"]
                found.append(
                    TCPStore(at.address, at.port, is_master=False, wait_for_workers=False, timeout=patience.left())
                )
            except (OSError, RuntimeError) as error:
                state[:] = [error]
                _pause(started)

    threading.Thread(target=connect, daemon=True).start()
    patience.wait(
        lambda: bool(found),
        lambda: f"{server}: {state[0] if state else 'no answer'}",
        ". Check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT name its machine.",
        speaks=world.rank == 1 or world.local_rank == 0,
    )
    return found[0]


@functools.cache
def _serve(port: int) -> TCPStore:
    """The store on this port, served by this process until it ends.

    Cached: the other ranks stay connected to it, and a second meeting in this process uses the same server instead of
    a port that is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    require_loopback()
    try:
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # it serves all addresses
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank 0 cannot serve the rendezvous on port {port}: {str(error).splitlines()[0]} "
            "Set MASTER_PORT to a free port of rank 0's machine, the same on every rank."
        ) from error


def _compare_worlds(store: Store, world: World) -> None:
    """Raise ValueError where the first rank that came here has another world.

    torchrun has compared already, and its store outlives worlds of other sizes.
    """
    if world.launcher == "torchelastic":
        return
    sizes = f"`num_nodes={world.num_nodes}`, {world.size} ranks in all"
    own = f"{sizes}; {world.local_size} of them on node {world.node_rank}"
    first = store.compare_set("world", "", own).decode()
    if first.partition(";")[0] != sizes:
        raise ValueError(
            f"The nodes disagree. This one was started with {own}. Another one with {first}. Start all with the same "
            "`num_nodes`, and each with as many `devices` as the others."
        )


def call_roll(store: Store, world: World, patience: Patience) -> str:
    """The name of this meeting: the prefix of its keys. Ranks: all call it, and it returns once all have.

    Six requests per rank. Rank 0 looks at intervals that grow, and so does rank 1, and one rank of each other node,
    until rank 0 is there.
    Raises: TimeoutError: some rank did not arrive; the message names it.
    """
    from torch.distributed import DistStoreError

    number = store.add(f"joins/{_life_of(world.rank)}", 1)  # Note [Meetings are numbered by each rank]
    token = uuid.uuid4().hex
    here = [f"here/{number}/{rank}" for rank in range(world.size)]
    store.set(here[world.rank], token)

    def missing(keys: Sequence[str], otherwise: Sequence[int] = ()) -> str:
        ranks = [rank for rank, key in enumerate(keys) if not store.check([key])] or otherwise
        return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}" if ranks else ""

    if world.rank != 0:
        called = f"call/{token}"
        if world.rank == 1 or world.local_rank == 0:
            patience.wait(lambda: store.check(here[:1]), lambda: "rank 0", ADVICE)
        with contextlib.suppress(DistStoreError):
            store.wait([called], patience.left())
        patience.wait(lambda: store.check([called]), lambda: missing(here, [0]), ADVICE)
        name = store.get(called).decode()
        store.set(f"arrived/{name}/{world.rank}", "")
        return name
    arrived = [f"arrived/{token}/{rank}" for rank in range(world.size)]
    store.set(arrived[0], "")
    called_ranks: set[bytes] = set()

    def all_have_arrived() -> bool:
        if not store.check(here):
            return False
        for one in set(store.multi_get(here[1:])) - called_ranks:
            store.set(f"call/{one.decode()}", token)
            called_ranks.add(one)
        return store.check(arrived)

    patience.wait(all_have_arrived, lambda: missing(here) or missing(arrived), ADVICE)
    return token


@functools.cache
def _life_of(rank: int) -> str:
    """Unique id of this rank of this process. By rank, because ranks may be threads, and two threads that call a cached
    function at the same time get two results."""
    return uuid.uuid4().hex


@final
class Patience:
    """How one rank waits in one meeting, which lasts `timeout_seconds` at most."""

    def __init__(self, world: World, timeout_seconds: float, report: Callable[[str], None]) -> None:
        self._who, self._seconds, self._report = f"rank {world.rank} of {world.size}", timeout_seconds, report
        self._deadline = time.monotonic() + timeout_seconds
        self._next_words = time.monotonic() + SAY_EVERY_SECONDS

    def left(self) -> timedelta:
        """The time until the deadline."""
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self._deadline

    def wait(
        self, has_come: Callable[[], bool], awaited: Callable[[], str], advice: str, *, speaks: bool = True
    ) -> None:
        """Return once it `has_come`. Meanwhile a rank that `speaks` reports what is `awaited`.

        Raises: TimeoutError: it names what is awaited.
        """
        started = time.monotonic()
        while not has_come():
            if self.is_over():
                raise TimeoutError(f"{self._who.capitalize()} waited {self._seconds:g} s for {awaited()}{advice}")
            if time.monotonic() > self._next_words:
                self._next_words = time.monotonic() + SAY_EVERY_SECONDS
                if speaks:
                    self._report(f"{self._who} waits for {awaited()}")
            _pause(started)


def _pause(since: float) -> None:
    """Sleep before another look; longer if the first one was long ago."""
    time.sleep(min(max((time.monotonic() - since) * LATER, 0.001), LONGEST_PAUSE_SECONDS))
