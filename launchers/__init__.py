"""Processes: how many, their ranks, where they meet, what happens when one dies.

The names below are imported when they are first used, so that a program imports only the launcher that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.launchers.choose import choose_launcher as choose_launcher
    from fabric.launchers.environments import Environment as Environment
    from fabric.launchers.environments import detect_world as detect_world
    from fabric.launchers.launcher import Launcher as Launcher
    from fabric.launchers.launcher import Topology as Topology
    from fabric.launchers.launcher import WorkerError as WorkerError
    from fabric.launchers.rank.fork_safety import fork_is_safe as fork_is_safe
    from fabric.launchers.rendezvous.join import join as join
    from fabric.launchers.world import Rendezvous as Rendezvous
    from fabric.launchers.world import World as World

_HOME = {
    "Environment": "environments",
    "Launcher": "launcher",
    "Rendezvous": "world",
    "Topology": "launcher",
    "WorkerError": "launcher",
    "World": "world",
    "choose_launcher": "choose",
    "detect_world": "environments",
    "fork_is_safe": "rank.fork_safety",
    "join": "rendezvous.join",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fabric.launchers' has no attribute {name!r}")
    return getattr(import_module(f"fabric.launchers.{_HOME[name]}"), name)
