"""The role of a cluster environment: is this process one of its ranks, and which one?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from fabric.launchers.world import World


class Environment(ABC):
    """The environment variables that one external launcher sets in the processes it starts."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The launcher's name; it becomes `World.launcher`."""

    @property
    def looked_for(self) -> str:
        """The variables that `detect` looks for, and who sets them, for the error if none is found."""
        return ""

    @property
    def telling(self) -> tuple[str, ...]:
        """The variables with the world's size, for errors."""
        return "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether these variables are those of a rank of this launcher."""

    @abstractmethod
    def world(self, environ: Mapping[str, str]) -> World:
        """The world of this process. Called if `detect` returned True.

        Raises: ValueError: variables are missing or contradict each other; the message names them and their values.
        """
