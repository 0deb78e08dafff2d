"""The role of a cluster environment: is this process one of its ranks, and which one?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from fabric.launchers.world import World


class Environment(ABC):
    """What one launcher of the field leaves in the environment variables of the processes it starts."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The launcher's word; it becomes `World.launcher`."""

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether these variables are those of a rank of this launcher."""

    @abstractmethod
    def world(self, environ: Mapping[str, str]) -> World:
        """Who this process is. Called where `detect` said yes.

        Raises: ValueError: variables are missing or contradict each other; the message names them and their values.
        """
