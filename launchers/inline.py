"""Starts no process: the calling process is the only rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

from fabric.launchers.launcher import Launcher, Topology
from fabric.launchers.world import World

R = TypeVar("R")


@final
class Inline(Launcher):
    """The calling process is rank 0 of 1, and its own supervisor."""

    def __init__(self, topology: Topology | None = None) -> None:
        assert topology is None or topology.size == 1

    def launch(self, worker: Callable[..., R], *args: Any) -> R:
        return worker(self.enter(), *args)

    def enter(self) -> World:
        return World()
