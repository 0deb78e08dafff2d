"""The role of a launcher: let processes come to be, and bring the result of rank 0 home.

Whoever holds a launcher never asks which one it is. `launch` runs a function on every rank; `enter` turns what
follows the call into the code of every rank. A launcher that cannot do one of the two says which one can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fabric.launchers.world import World

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many processes to start, and where they meet."""

    num_processes: int
    """Processes on this node."""
    num_nodes: int = 1
    node_rank: int = 0
    main_address: str = "127.0.0.1"
    """Address of node 0, as the other nodes see it."""
    main_port: int = 0
    """Port on node 0. 0 lets the system choose a free one, which only works on a single node."""

    @property
    def size(self) -> int:
        """Processes over all nodes."""
        return self.num_processes * self.num_nodes


class Launcher(ABC):
    """Makes the processes of a world and supervises them.

    The process that calls is the supervisor: it is not a rank, unless the launcher says so (inline, external). It
    forwards signals, reports the first failure, ends the other ranks, and leaves no process behind.
    """

    @abstractmethod
    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        """Run `worker(world, *args)` on every rank and give back what it returned on rank 0.

        Raises: WorkerError: a rank raised, died, or left without a result. The first failure counts.
        """

    @abstractmethod
    def enter(self) -> World:
        """Return in every rank with its world. The supervisor does not return: it ends with the ranks' exit code."""
