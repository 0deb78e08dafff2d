"""The role of a launcher: to start processes, and to return the result of rank 0.

Callers never ask which launcher they have. `launch` runs a function on every rank; after `enter`, every rank runs the
code that follows the call. A launcher that supports only one of them raises, and names one that supports the other.
`External` starts nothing: the ranks exist already, started by torchrun, srun, by hand, or by a launcher of fabric; or
this process is the only one.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, final

from fabric.launchers.world import Rendezvous, World

R = TypeVar("R")


class WorkerError(RuntimeError):
    """A rank raised, died, or exited without a result; the message ends with that rank's own traceback.

    `rank` is the rank that failed first. It exited with `exit_code`, or was killed by `signal`. `cause` and `__cause__`
    are the exception that it raised, an instance of the same class; None if it raised none, or one that cannot be
    pickled. Code that expects an exception of the function, such as optuna's `TrialPruned`, gets it by

        except WorkerError as error:
            raise error.__cause__ or error
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,  # until pickle sets it
        exit_code: int | None = None,
        signal: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.signal = rank, exit_code, signal
        self.cause = self.__cause__ = cause

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.cause
        try:
            pickle.dumps(cause)
        except Exception:
            cause = None
        return type(self), self.args, {**vars(self), "cause": cause, "__cause__": cause}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many processes to start, where they meet, and where their output goes."""

    num_processes: int
    """Processes on this node."""
    num_nodes: int = 1
    node_rank: int = 0
    main_address: str = "127.0.0.1"
    """Address of node 0, as the other nodes see it."""
    main_port: int = 0
    """Port on node 0. 0 lets the system choose a free one, which only works on a single node."""
    attempt: int = 0
    """Which start of the same job this is."""
    log_dir: str | None = None
    """The folder with a file for the output of each rank; None: no files."""
    prefix_output: bool = False
    """Whether each line that a rank writes is shown with its rank."""
    stop_grace_seconds: float | None = None
    """How long ranks may go on after a signal that ends the job; None: 30 s, and as long as a save takes."""

    @property
    def redirects_output(self) -> bool:
        """Whether a supervisor reads what the ranks print."""
        return self.log_dir is not None or self.prefix_output

    @property
    def size(self) -> int:
        """Processes over all nodes."""
        return self.num_processes * self.num_nodes

    def world(self, local_rank: int, *, port: int, launcher: str) -> World:
        """The world of one rank of this node, whose store is served on `port`."""
        at = Rendezvous(address=self.main_address, port=port, hosted=True, attempt=self.attempt)
        return World(
            rank=self.node_rank * self.num_processes + local_rank,
            size=self.size,
            local_rank=local_rank,
            local_size=self.num_processes,
            node_rank=self.node_rank,
            num_nodes=self.num_nodes,
            rendezvous=at if self.size > 1 or self.attempt else None,
            launcher=launcher,
        )


class Launcher(ABC):
    """Starts the processes of a world and supervises them.

    The process that calls is the supervisor: it is not a rank, unless the launcher says so (inline, external). It
    forwards signals, reports the first failure, ends the other ranks, and leaves no process behind.
    """

    @abstractmethod
    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        """Run `worker(world, *args)` on every rank and return the result of rank 0.

        Raises: WorkerError: a rank raised, died, or exited without a result; the first failure is reported.
        """

    @abstractmethod
    def enter(self) -> World:
        """Return in every rank with its world. The supervisor does not return: it ends with the ranks' exit code."""


@final
class External(Launcher):
    """This process is a rank already. Each rank gets the result of its own call."""

    def __init__(self, world: World) -> None:
        self.world = world

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        return worker(self.world, *args)

    def enter(self) -> World:
        return self.world


def inline(topology: Topology) -> External:
    """The calling process is rank 0 of 1, and its own supervisor."""
    assert topology.size == 1
    return External(World())
