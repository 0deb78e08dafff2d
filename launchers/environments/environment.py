"""The role of a cluster environment: is this process one of its ranks, and which one?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from fabric.launchers.world import World


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a launcher starts a script, and what it needs for that: `fabric doctor` looks for it."""

    command: str
    program: str | None = None
    """What has to be on PATH, unless `variable` is set."""
    package: str | None = None
    """What has to be importable."""
    variable: str | None = None
    """What is set wherever it can run."""
    files: tuple[str, ...] = ()
    """Where the program finds its cluster: one of these has to exist. `$NAME`: the paths in a variable; `PREFIX`: where
    the program is installed."""
    cluster: str = ""
    """What gives it such a file."""
    otherwise: str = ""
    """What makes it run where the rest is missing."""


class Environment(ABC):
    """What one launcher of the field leaves in the environment variables of the processes it starts."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The launcher's word; it becomes `World.launcher`."""

    @property
    def start(self) -> Start | None:
        """How a script is started by it; None where `fabric doctor` leaves it out."""
        return None

    @property
    def looked_for(self) -> str:
        """The variables that make `detect` say yes, and who sets them, for the error that none were found."""
        return ""

    @property
    def telling(self) -> tuple[str, ...]:
        """The variables that tell of the world's size, for errors."""
        return "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether these variables are those of a rank of this launcher."""

    @abstractmethod
    def world(self, environ: Mapping[str, str]) -> World:
        """Who this process is. Called where `detect` said yes.

        Raises: ValueError: variables are missing or contradict each other; the message names them and their values.
        """
