"""Choose the name of a meeting of ranks that were started at different times, some of them after a restart.

# Note [Restarts that are counted apart]
On several nodes each agent of torchrun counts the failures of its own ranks alone: after one failure
TORCHELASTIC_RESTART_COUNT may be 1 here and 0 there, and the one store of all agents still holds what earlier ranks
wrote into it. (`init_process_group` of torch 2.13 then finds the addresses of dead ranks, and fails once more.) So rank
0 gives the meeting a new name, and sends it to every rank that has registered. A rank that has died since does not use
it; its replacement registers again, and receives the name.
"""

from __future__ import annotations

import functools
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from fabric.launchers.rendezvous.waiting import Patience
from fabric.launchers.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PAUSE = timedelta(milliseconds=20)
"""How often rank 0 looks which ranks have registered: three requests each time, at any number of ranks."""


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
