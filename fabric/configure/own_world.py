"""`Fabric(devices=1)` inside a rank as a world of its own: a player beside the learner, a merge on rank 0.

Under an external launcher, one device may be a mistake: `torchrun --nproc-per-node 2` with a script for one device
would make two worlds, each with a "rank 0" that writes the same files. So there, the process must have joined the other
ranks before: after one fabric was launched, `devices=1` is taken as meant. A rank of our own launchers needs no such
proof: the program asked for several ranks.

If each node has one process, `devices=1` describes the existing world; `strategy='single_device'` makes a separate one.
"""

from __future__ import annotations

from dataclasses import replace

from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.launchers.registry import OURS


def world_of_its_own(request: Request, machine: Machine) -> Machine:
    """The machine for a fabric of one process inside a rank; the machine unchanged if the request asks for none.

    `devices=1` means the device that this rank already uses.
    """
    world = machine.world
    if world is None or world.size == 1 or not request.asks_for_one(world):
        return machine
    if world.launcher not in OURS and not machine.has_met_others:
        return machine
    own_device = machine.current_device if machine.current_device is not None else world.local_rank
    return replace(machine, world=None, variables=(), own_device=own_device)
