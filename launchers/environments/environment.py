"""The role of a cluster environment, and the reader of its variables, whose errors name the variables and their values.

An environment says whether this process is one of its ranks, and which one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from fabric.launchers.world import Rendezvous, World

FIRST_PORT, NUM_PORTS = 15_000, 10_000
"""Below the ports that systems choose by themselves (32768 and up on Linux)."""


class Environment(ABC):
    """The environment variables that one external launcher sets in the processes it starts."""

    name: str
    """The launcher's name; it becomes `World.launcher`."""
    looked_for: str = ""
    """The variables that `detect` looks for, and who sets them, for the error if none is found."""
    names: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    """The variables that errors show: they place a rank in its world."""

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether these variables are those of a rank of this launcher."""

    @abstractmethod
    def world(self, environ: Mapping[str, str]) -> World:
        """The world of this process. Called if `detect` returned True.

        Raises: ValueError: variables are missing or contradict each other; the message names them and their values.
        """


@final
@dataclass(frozen=True, slots=True)
class Variables:
    """The variables of one launcher."""

    environ: Mapping[str, str]
    setter: str
    """Who sets them, for errors."""
    names: tuple[str, ...]
    """The variables that errors show."""
    or_else: str = ""
    """What else can be done about a missing variable."""

    def text(self, name: str) -> str:
        """The value of a variable."""
        if not self.environ.get(name):
            how = "empty" if name in self.environ else "not set"
            raise ValueError(f"{self.setter} sets `{name}`, but it is {how} here. Set it on every rank{self.or_else}.")
        return self.environ[name]

    def integer(self, name: str, default: int | None = None) -> int:
        """The integer in a variable, or the default if it is not set."""
        if default is not None and name not in self.environ:
            return default
        word = self.text(name)
        try:
            return int(word)
        except ValueError:
            raise ValueError(
                f"`{name}={word}` is not a whole number. {self.setter} sets it to one on every rank."
            ) from None

    def show(self) -> str:
        """The variables that are set, as they would be written in a shell."""
        return " ".join(f"{name}={self.environ[name]}" for name in self.names if name in self.environ)

    def served_by_rank_0(self, address: str, job: int, *, step: int = 0, attempt: int = 0) -> Rendezvous:
        """The rendezvous at rank 0's `address`: on MASTER_PORT, or a port derived from the job's number, so that two
        jobs on a node do not conflict."""
        port = self.integer("MASTER_PORT", FIRST_PORT + (job * 7 + step) % NUM_PORTS)
        return Rendezvous(address=address, port=port, attempt=attempt)

    def world(self, launcher: str, rendezvous: Rendezvous | None, *numbers: int) -> World:
        """The world of these `numbers`: rank, size, local rank, local size, node rank and number of nodes.

        A world of one drops its rendezvous. Raises: ValueError: the numbers contradict each other.
        """
        fields = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
        place = dict(zip(fields, numbers, strict=True))
        try:
            return World(**place, rendezvous=rendezvous if place["size"] > 1 else None, launcher=launcher)
        except ValueError as error:
            raise ValueError(
                f"{self.show()}: these contradict each other. {error} Start the ranks with {self.setter}, and leave "
                "its variables as they are."
            ) from error
