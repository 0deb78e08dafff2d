"""Processes: how many, who is who, where they meet, what happens when one dies."""

from fabric.launchers.choose import choose_launcher as choose_launcher
from fabric.launchers.environments import Environment as Environment
from fabric.launchers.environments import detect_world as detect_world
from fabric.launchers.fork_safety import fork_is_safe as fork_is_safe
from fabric.launchers.launcher import Launcher as Launcher
from fabric.launchers.launcher import Topology as Topology
from fabric.launchers.launcher import WorkerError as WorkerError
from fabric.launchers.rendezvous import join as join
from fabric.launchers.world import Rendezvous as Rendezvous
from fabric.launchers.world import World as World
