"""Processes: how many, their ranks, where they meet, what happens when one dies.

`choose.py` and the launchers are imported where they are used, so that a program imports only the one that it needs.
"""

from fabric.launchers.environments import Environment as Environment
from fabric.launchers.environments import detect_world as detect_world
from fabric.launchers.launcher import Launcher as Launcher
from fabric.launchers.launcher import Topology as Topology
from fabric.launchers.launcher import WorkerError as WorkerError
from fabric.launchers.rendezvous.join import join as join
from fabric.launchers.world import Rendezvous as Rendezvous
from fabric.launchers.world import World as World
