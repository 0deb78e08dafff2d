"""A process that a rank forks, such as a worker of a `DataLoader`, is not a rank: it has copies of the rank's sockets,
but not the threads that serve them, so a collective in it would wait for ever. It raises instead."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Connected(Protocol):
    """A collective that a forked process must not use."""

    def forget(self) -> None:
        """Drop the connection without ending it. Called in the forked process."""


_CONNECTED: WeakSet[Connected] = WeakSet()


def forget_in_forks(collective: Connected) -> None:
    """Call `forget` in each process that this one forks from now on, as long as the collective exists."""
    _CONNECTED.add(collective)


def in_a_fork(operation: str, rank: int) -> str:
    """The text of the error that a collective raises in a forked process."""
    return (
        f"`{operation}` in a process that rank {rank} has forked (a worker of a `DataLoader`, `multiprocessing`, "
        "`os.fork`), and which is not a rank: it cannot reach the other ranks. Call collectives in the process of the "
        "rank alone, and pass a dataset what it needs of them, such as `fabric.global_rank`."
    )


def _forget() -> None:
    for each in list(_CONNECTED):
        each.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
