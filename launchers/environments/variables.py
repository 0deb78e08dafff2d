"""Reads a world from environment variables, with errors that name the variables and their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from fabric.launchers.world import Rendezvous, World

FIRST_PORT, NUM_PORTS = 15_000, 10_000
"""Below the ports that systems hand out by themselves (32768 and up on Linux)."""


@final
@dataclass(frozen=True, slots=True)
class Variables:
    """The variables of one launcher."""

    environ: Mapping[str, str]
    setter: str
    """Who sets them, for errors."""
    names: tuple[str, ...]
    """Those that errors show."""
    or_else: str = ""
    """What else can be done about one that is missing."""

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

    def port_of_job(self, job: int, step: int = 0) -> int:
        """MASTER_PORT, or a port derived from the job's number, so that two jobs on a node do not conflict."""
        return self.integer("MASTER_PORT", FIRST_PORT + (job * 7 + step) % NUM_PORTS)

    def world(self, launcher: str, rendezvous: Rendezvous | None, *numbers: int) -> World:
        """The world of these `numbers`: rank, size, local rank, local size, node rank and number of nodes.

        A world of one drops its rendezvous. Raises: ValueError: the numbers contradict each other.
        """
        rank, size, local_rank, local_size, node_rank, num_nodes = numbers
        try:
            return World(
                rank=rank,
                size=size,
                local_rank=local_rank,
                local_size=local_size,
                node_rank=node_rank,
                num_nodes=num_nodes,
                rendezvous=rendezvous if size > 1 else None,
                launcher=launcher,
            )
        except ValueError as error:
            raise ValueError(
                f"{self.show()}: these contradict each other. {error} Start the ranks with {self.setter}, and leave "
                "its variables as they are."
            ) from error
