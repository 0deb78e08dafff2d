"""When `Fabric(devices=1)` inside a rank is a world of its own: a player beside the learner, a merge on rank 0.

Under a launcher that is not ours the same words may be a mistake: `torchrun --nproc-per-node 2` and a script for one
device would be two worlds, each "rank 0", that write the same files. So there a process must have met the other ranks
first: once a fabric is launched, another of one device is meant. A rank of a launcher of ours always has: it exists
because the program asked for several.

Where each node has one process, `devices=1` describes the world that there is; `strategy='single_device'` is what makes
the difference.
"""

from __future__ import annotations

from dataclasses import replace

from fabric.launchers.registry import OURS
from fabric.machine import Machine
from fabric.request import Request


def world_of_its_own(request: Request, machine: Machine) -> Machine:
    """The machine as it is for a fabric of one process inside a rank; as it was where the request asks for no such.

    A count of one device means the one that this rank uses already.
    """
    world = machine.world
    if world is None or world.size == 1 or not request.asks_for_one(world):
        return machine
    if world.launcher not in OURS and not machine.has_met_others:
        return machine
    own_device = machine.current_device if machine.current_device is not None else world.local_rank
    return replace(machine, world=None, variables=(), own_device=own_device)
