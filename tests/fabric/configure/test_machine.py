"""What a look at this machine finds. The questions that need another kind of process are asked in one."""

from __future__ import annotations

import os
import sys

import pytest
import template
import torch

from fabric.configure.machine import Found, Machine
from fabric.configure.request import Request
from fabric.launchers.environments.slurm import SlurmEnvironment
from fabric.strategies.accelerators import CPUAccelerator, TorchAccelerator

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_the_cpu_is_always_found() -> None:
    found = Machine.look({}, Request()).of("cpu")
    assert found == Found(accelerator=CPUAccelerator(), num_devices=1)


def test_an_accelerator_that_cannot_be_used_has_a_reason() -> None:
    for found in Machine.look({}, Request()).found:
        assert (found.why_unavailable is None) == (found.num_devices > 0)


def test_an_environment_without_variables_is_no_world() -> None:
    machine = Machine.look({}, Request())
    assert machine.world is None
    assert machine.variables == ()


def test_the_world_of_torchrun_is_detected_with_its_variables() -> None:
    machine = Machine.look({**TORCHRUN, "HOME": "/"}, Request())
    assert machine.world is not None
    assert (machine.world.rank, machine.world.size, machine.world.num_nodes) == (1, 4, 2)
    assert machine.world.launcher == "torchelastic"
    place = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=2"
    assert " ".join(machine.variables) == place


def test_only_the_users_cluster_environment_is_asked() -> None:
    with pytest.raises(ValueError, match="holds the cluster environment 'slurm', but its variables are not set"):
        Machine.look(TORCHRUN, Request(environment=SlurmEnvironment()))


def test_an_unknown_accelerator_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"`accelerator='cudo'` is not known. Did you mean 'cuda'\? Write 'auto'"):
        Machine.look({}, Request(accelerator="cudo"))


def test_the_usable_accelerators_end_with_the_cpu() -> None:
    cpu = Found(accelerator=CPUAccelerator(), num_devices=1)
    cuda = Found(accelerator=TorchAccelerator("cuda"), num_devices=2)
    mps = Found(accelerator=TorchAccelerator("mps"), num_devices=0, why_unavailable="None here.")
    assert Machine(found=(cpu, mps, cuda)).usable() == (cuda, cpu)


def program_of(*arguments: str, stdin: str | None = None) -> str:
    done = template.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.split()[-1]


LOOK = """
from fabric.configure.machine import Machine
from fabric.configure.request import Request
print(Machine.look({}, Request()).program.kind)
"""
FORK_AFTER_LOOKING = (
    LOOK
    + """
import os, torch
if os.fork() == 0:
    torch.ones(1, device="cuda")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
)


@pytest.mark.slow
def test_the_way_the_program_was_started_is_detected(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "look.py")
    with open(script, "w") as file:
        file.write(LOOK)
    assert program_of(script) == "script"
    assert program_of("-c", LOOK) == "command"
    assert program_of(stdin=LOOK) == "stdin"
    assert program_of("-i", "-q", stdin=f"{LOOK}\n") == "interactive"


@pytest.mark.gpu
def test_a_process_that_looked_can_still_fork_children_that_use_cuda() -> None:
    assert torch.cuda.device_count() > 0
    assert program_of("-c", FORK_AFTER_LOOKING) == "0"
