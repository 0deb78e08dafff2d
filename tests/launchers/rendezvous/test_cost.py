"""What a meeting asks of the store grows with the number of ranks, and no faster."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from torch.distributed import HashStore

from fabric.launchers.rendezvous.join import Patience, call_roll
from fabric.launchers.world import Rendezvous, World


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self._store, self._lock = HashStore(), threading.Lock()
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            with self._lock:
                self.requests[name] += 1
            return method(*args)

        return ask


def meet(size: int) -> Counter[str]:
    store: Any = Counted()
    at = Rendezvous(address="127.0.0.1", port=1, hosted=True)

    def arrive(rank: int) -> None:
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=at)
        call_roll(store, world, Patience(world, 60, print))

    ranks = [threading.Thread(target=arrive, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    found: Counter[str] = store.requests
    return found


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_rendezvous_costs_six_requests_per_rank_and_the_polling_of_few(size: int) -> None:
    requests = meet(size)
    looks = requests.pop("check")
    assert requests.pop("multi_get") >= 1
    assert requests == {"add": size, "set": 3 * size - 1, "wait": size - 1, "get": size - 1}
    assert looks >= size


def test_rank_zero_polls_at_growing_intervals() -> None:
    store: Any = Counted()
    world = World(rank=0, size=2, local_size=2, rendezvous=Rendezvous(address="127.0.0.1", port=1, hosted=True))
    with pytest.raises(TimeoutError, match=r"waited 0\.5 s for rank 1, which did not arrive"):
        call_roll(store, world, Patience(world, 0.5, print))
    assert store.requests["check"] < 100
    assert store.requests["wait"] == 0
