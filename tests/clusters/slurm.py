"""A SLURM cluster of two machines for a test: the real slurmctld and slurmd, with a configuration of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machines import Machine, machines

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "scancel")
START_SECONDS = 30.0

# `cred_expire`: a job that is requeued waits so many seconds, two minutes unless it is said.
CONFIGURATION = """
ClusterName=fabric
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
NodeName={names} CPUs=32
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A running cluster; commands are typed on its first machine."""

    machines: tuple[Machine, ...]
    configuration: Path

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM's to its end."""
        return self.machines[0].run(*command, env=self.environ(), stdin=subprocess.DEVNULL, **options)

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command of SLURM's."""
        return self.machines[0].start(*command, env=self.environ(), **options)

    def environ(self) -> dict[str, str]:
        """The environment in which SLURM's commands find this cluster."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # a job's `python` is this one
        return {**os.environ, "SLURM_CONF": str(self.configuration), "PATH": path}


@contextlib.contextmanager
def slurm(names: tuple[str, ...], folder: Path) -> Iterator[Slurm]:
    """A cluster of the machines of these names, ready for jobs; the first is the controller, too."""
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(first=names[0], names=",".join(names), folder=folder))
    (folder / "state").mkdir()
    for name in names:
        (folder / f"spool.{name}").mkdir()
    with contextlib.ExitStack() as stack:
        cluster = Slurm(machines=stack.enter_context(machines(names, folder)), configuration=configuration)
        _daemon(stack, cluster, cluster.machines[0], "slurmctld")
        for machine in cluster.machines:
            _daemon(stack, cluster, machine, "slurmd")
        stack.callback(cluster.run, "scancel", "--full", "--signal=KILL", "--user=root")
        _await_idle(cluster, len(names))
        yield cluster


def _daemon(stack: contextlib.ExitStack, cluster: Slurm, machine: Machine, program: str) -> None:
    log = stack.enter_context(cluster.configuration.with_name(f"{program}.{machine.name}.log").open("w"))
    command = (program, "-D", "-f", cluster.configuration)
    process = machine.start(*command, env=cluster.environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


def _await_idle(cluster: Slurm, num_machines: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        seen = cluster.run("sinfo", "--noheader", "--format=%T %D")
        if seen.stdout.strip() == f"idle {num_machines}":
            return
        if time.monotonic() > deadline:
            logs = "".join(log.read_text() for log in cluster.configuration.parent.glob("*.log"))
            raise AssertionError(f"SLURM did not start: {seen.stdout}{seen.stderr}\n{logs}")
