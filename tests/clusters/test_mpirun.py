"""Open MPI's mpirun, the real one, on two machines: its daemon on the other one is started through ssh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked_python import python
from machines import Machine, machines, ssh, why_not

MPIRUN = shutil.which("mpirun", path=sysconfig.get_path("scripts")) or shutil.which("mpirun")
MISSING = why_not("mpirun") if MPIRUN is None else why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=f"`make test-horovod` runs these; here: {MISSING}"),
]
needs_mpi4py = pytest.mark.skipif(find_spec("mpi4py") is None, reason="`make test-horovod` runs these; here is none")

PROGRAM = """
import json, os, sys
from socket import gethostname
doing = sys.argv[1]
if doing == "mpi4py":
    from mpi4py import MPI
import torch
from fabric import Fabric
from fabric.launchers import detect_world

fabric = Fabric(accelerator="cpu", strategy="ddp")
fabric.launch()
total = fabric.all_reduce(torch.tensor(2.0 ** fabric.global_rank), reduce_op="sum").item()
if doing == "mpi4py":
    assert MPI.COMM_WORLD.Get_rank() == fabric.global_rank
    assert MPI.COMM_WORLD.Get_size() == fabric.world_size  # no message: ranks that poll starve those of the other node
if doing == "raise" and fabric.node_rank == 1:
    raise ArithmeticError("the second node cannot go on")
if doing == "raise":
    fabric.barrier()
world = detect_world(os.environ)
place = [fabric.global_rank, gethostname(), fabric.node_rank, fabric.local_rank, world.local_size, world.launcher]
sys.stdout.write(json.dumps([*place, fabric.world_size, total]) + "\\n")
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Machine, ...]]:
    (tmp_path / "program.py").write_text(PROGRAM)
    with machines(("n1", "n2"), tmp_path) as both:
        ssh(both, tmp_path)
        yield both


def mpirun(nodes: tuple[Machine, ...], tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Type mpirun on the first machine, for ranks that run Python with these arguments, two on each machine."""
    assert MPIRUN is not None
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    options = ("--host", "n1:2,n2:2", "-x", "MASTER_ADDR=n1", "-x", "OMP_NUM_THREADS=1")
    own = (sys.executable,) if "mpi4py" in words else python()  # its library of MPI is loaded at the start
    return nodes[0].run(MPIRUN, *options, *own, *words, env=environ, stdin=subprocess.DEVNULL)


@needs_mpi4py  # the test below connects the same ranks without it
def test_ranks_on_two_nodes_are_one_world(nodes: tuple[Machine, ...], tmp_path: Path) -> None:
    done = mpirun(nodes, tmp_path, "-m", "mpi4py", str(tmp_path / "program.py"), "mpi4py")
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")) == [
        [0, "n1", 0, 0, 2, "mpi", 4, 15.0],
        [1, "n1", 0, 1, 2, "mpi", 4, 15.0],
        [2, "n2", 1, 0, 2, "mpi", 4, 15.0],
        [3, "n2", 1, 1, 2, "mpi", 4, 15.0],
    ]


def test_a_rank_that_raises_on_one_node_ends_those_of_the_other(nodes: tuple[Machine, ...], tmp_path: Path) -> None:
    start = time.monotonic()
    done = mpirun(nodes, tmp_path, str(tmp_path / "program.py"), "raise")
    assert done.returncode != 0
    assert "ArithmeticError: the second node cannot go on" in done.stderr
    assert time.monotonic() - start < 90, "it ended with its timeout only"
