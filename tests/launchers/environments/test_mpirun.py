"""Ranks of a real mpirun, with and without mpi4py in the script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked_python import python
from processes import run

MPIRUN = shutil.which("mpirun", path=sysconfig.get_path("scripts")) or shutil.which("mpirun")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MPIRUN is None, reason="`make test-horovod` runs these; here is no mpirun"),
]
needs_mpi4py = pytest.mark.skipif(find_spec("mpi4py") is None, reason="`make test-horovod` runs these; here is none")

PROGRAM = """
import json, os, sys
doing = sys.argv[1]
if doing.startswith("mpi4py"):
    from mpi4py import MPI
import torch
from fabric import Fabric
from fabric.launchers import detect_world

fabric = Fabric(accelerator="cpu", devices=int(sys.argv[2]) if sys.argv[2:] else "auto")
fabric.launch()
total = fabric.all_reduce(torch.tensor(2.0 ** fabric.global_rank), reduce_op="sum").item()
if doing.endswith("raise") and fabric.global_rank == 1:
    raise ArithmeticError("rank 1 cannot go on")
if doing.endswith("raise"):
    fabric.barrier()
if doing == "mpi4py":
    everyone = MPI.COMM_WORLD
    assert (everyone.Get_rank(), everyone.Get_size()) == (fabric.global_rank, fabric.world_size)
    assert everyone.allreduce(2.0 ** fabric.global_rank) == total
world = detect_world(os.environ)
place = [world.launcher, world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes]
sys.stdout.write(json.dumps([*place, total]) + "\\n")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def mpirun(size: int, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on ranks of mpirun, also as root, and on more ranks than cores."""
    assert MPIRUN is not None
    start = f"import os, sys; os.execvp({MPIRUN!r}, [{MPIRUN!r}, *sys.argv[1:]])"
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    own = (sys.executable,) if "mpi4py" in arguments else python()  # its library of MPI is loaded at the start
    words = ["--oversubscribe", "-np", str(size), *own, *map(str, arguments)]
    return run(["-c", start, *words], **{"OMP_NUM_THREADS": "1", **allowed, **environ})


def places(done: subprocess.CompletedProcess[str]) -> list[list[object]]:
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("size", [1, 4])
def test_ranks_of_mpirun_have_their_ranks_and_communicate(size: int, program: Path) -> None:
    found = places(mpirun(size, program, "end"))
    # Where there are more ranks than cores, mpirun counts local ranks core by core: 0, 2, 1, 3.
    local_ranks = [place.pop(3) for place in found]
    assert sorted(local_ranks) == list(range(size))  # type: ignore[type-var]
    assert found == [["mpi", rank, size, size, 0, 1, 2.0**size - 1] for rank in range(size)]


@needs_mpi4py
def test_a_script_that_uses_mpi4py_has_the_same_ranks_there(program: Path) -> None:
    assert places(mpirun(2, "-m", "mpi4py", program, "mpi4py")) == [
        ["mpi", rank, 2, rank, 2, 0, 1, 3.0] for rank in range(2)
    ]


@pytest.mark.parametrize("doing", ["raise", pytest.param("mpi4py, raise", marks=needs_mpi4py)])
def test_a_rank_that_raises_ends_the_job_at_once(doing: str, program: Path) -> None:
    start = time.monotonic()
    by_mpi4py = ["-m", "mpi4py"] if "mpi4py" in doing else []
    done = mpirun(2, *by_mpi4py, program, doing)
    assert done.returncode != 0
    assert "ArithmeticError: rank 1 cannot go on" in done.stderr
    assert time.monotonic() - start < 60, "it ended with its timeout only"


def test_a_number_of_devices_that_is_not_mpiruns_is_an_error_with_both(program: Path) -> None:
    done = mpirun(2, program, "end", "3")
    assert done.returncode != 0
    words = "ask for 3 processes on this node, but mpi started 2 processes (2 on this node; read: OMPI_COMM_WORLD_RANK="
    assert words in done.stderr


def test_two_simultaneous_jobs_do_not_connect_to_each_other(program: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(mpirun, 2, program, "end") for _ in range(2)]
        for job in jobs:
            assert places(job.result()) == [["mpi", rank, 2, rank, 2, 0, 1, 3.0] for rank in range(2)]
