"""SLURM, the real one: a controller and two nodes are started here, and jobs are given to them as a person would.

Needs root, and SLURM's programs, which `make test-clusters` installs.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import python
from machines import why_not
from slurm import PROGRAMS, Slurm, slurm
from torch import nn

from fabric import read_checkpoint
from fabric.launchers.environments.slurm import first_host

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "slurm.sh"
MISSING = why_not(*PROGRAMS)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=f"`make test-clusters` runs these; here: {MISSING}"),
]

PLACE = """
import json, os, sys
import torch
from fabric import Fabric, read_checkpoint
from fabric.launchers import detect_world

fabric = Fabric(accelerator="cpu", devices=int(sys.argv[1]) if sys.argv[1:] else "auto")
fabric.launch()
world = detect_world(os.environ)
print(json.dumps({
    "launcher": world and world.launcher,
    "rank": fabric.global_rank, "size": fabric.world_size,
    "local_rank": fabric.local_rank, "node_rank": fabric.node_rank, "local_size": world and world.local_size,
    "node": os.environ.get("SLURMD_NODENAME"),
    "sum": fabric.all_reduce(torch.tensor(2.0 ** fabric.global_rank), reduce_op="sum").item(),
}) + "\\n", end="", flush=True)
fabric.close()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(("n1", "n2"), tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place.py").write_text(PLACE)
    return tmp_path / "place.py"


def places(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What the ranks printed, by rank."""
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda place: place["rank"])


def check_world(found: list[dict[str, Any]], *, size: int, launcher: str) -> None:
    """Every rank is there once, knows its node and its place on it, and hears all others."""
    assert [one["rank"] for one in found] == list(range(size))
    assert {(one["size"], one["sum"], one["launcher"]) for one in found} == {(size, 2.0**size - 1, launcher)}
    assert all(one["node"] == f"n{one['node_rank'] + 1}" for one in found)
    for node in {one["node"] for one in found}:
        here = [one for one in found if one["node"] == node]
        assert sorted(one["local_rank"] for one in here) == list(range(len(here)))
        assert {one["local_size"] for one in here} == {len(here)}


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (("--nodes=2", "--ntasks=3"), 3),
        (("--nodes=2", "--ntasks-per-node=2", "--distribution=cyclic"), 4),
    ],
)
def test_tasks_of_srun_are_the_ranks(cluster: Slurm, place: Path, options: tuple[str, ...], size: int) -> None:
    found = places(cluster.run("srun", *options, *python(), place))
    check_world(found, size=size, launcher="slurm")
    assert {one["node"] for one in found} == {"n1", "n2"}


def test_a_shell_of_salloc_is_not_a_rank_and_srun_in_it_starts_ranks(cluster: Slurm, place: Path) -> None:
    program = "{0}; srun {0}".format(" ".join((*python(), str(place))))
    alone, *together = places(cluster.run("salloc", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", program))
    assert (alone["launcher"], alone["size"]) == (None, 1)
    check_world(together, size=2, launcher="slurm")


def test_a_batch_script_is_not_a_rank_and_srun_in_it_starts_ranks(cluster: Slurm, place: Path, tmp_path: Path) -> None:
    script, output, over = tmp_path / "job.sh", tmp_path / "output", tmp_path / "over"
    os.mkfifo(over)
    program = " ".join((*python(), str(place)))
    commands = (program, f"srun bash -c '{program}'", f"echo over > {over}")
    script.write_text("\n".join(("#!/bin/sh", *commands)))
    job = cluster.run("sbatch", "--parsable", "--nodes=2", "--ntasks=2", "--output", output, script).stdout.strip()
    wait_for(over, cluster, output, job)  # `sbatch --wait` looks every 2 s, then every 4 s, then every 8 s
    text = output.read_text()
    alone, *together = places(subprocess.CompletedProcess((), 0, text, text))
    assert (alone["launcher"], alone["size"]) == (None, 1)
    check_world(together, size=2, launcher="slurm")


def test_one_task_with_a_terminal_is_a_person_and_several_are_ranks(cluster: Slurm, place: Path) -> None:
    own = on_terminal(cluster, "srun", "--pty", sys.executable, place, "2")
    check_world(own, size=2, launcher="fork")
    say = (
        f"{' '.join(python())} {place} > {place.parent}/$SLURM_PROCID.json"  # but for the first, tasks have no terminal
    )
    on_terminal(cluster, "salloc", "--nodes=2", "--ntasks=2", "srun", "--pty", "sh", "-c", say)
    together = [json.loads((place.parent / f"{rank}.json").read_text()) for rank in range(2)]
    check_world(together, size=2, launcher="slurm")


def on_terminal(cluster: Slurm, *command: str | Path) -> list[dict[str, Any]]:
    """Type a command at a terminal. What the ranks printed there, by rank."""
    ours, theirs = os.openpty()
    session = ("setsid", "--ctty", "--wait")  # salloc wants the terminal to be its session's own
    with cluster.start(*session, *command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=110)
    text = os.read(ours, 65536).decode() if select.select([ours], [], [], 0)[0] else ""
    os.close(ours)
    os.close(theirs)
    return places(subprocess.CompletedProcess(process.args, process.returncode, text, errors))


def test_tasks_that_are_called_bash_are_ranks(cluster: Slurm, place: Path) -> None:
    found = places(
        cluster.run("srun", "--nodes=1", "--nodelist=n1", "--ntasks=2", "bash", "-c", " ".join((*python(), str(place))))
    )
    check_world(found, size=2, launcher="slurm")
    assert {one["node"] for one in found} == {"n1"}


def test_torchrun_inside_a_job_is_torchrun(cluster: Slurm, place: Path) -> None:
    torchrun = (*python(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--no-python")
    meet = ("--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500")
    found = places(cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *torchrun, *meet, *python(), place))
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    assert {(one["size"], one["sum"], one["launcher"]) for one in found} == {(4, 15.0, "torchelastic")}


def test_fewer_devices_than_tasks_are_an_error_with_both_numbers(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("from fabric import Fabric\nFabric(accelerator='cpu', devices=1)\nprint('made')")
    done = cluster.run("srun", "--ntasks=2", *python(), tmp_path / "alone.py")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "ask for 1 process on this node, but slurm started 2 processes" in done.stderr
    assert "SLURM_STEP_NUM_TASKS=2" in done.stderr


def test_a_task_that_fails_ends_the_others(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(
        "from fabric import Fabric\n"
        "fabric = Fabric(accelerator='cpu')\n"
        "fabric.launch()\n"
        "if fabric.global_rank == 2: raise ValueError('boom')\n"
        "import signal\n"
        "signal.pause()\n"
    )
    done = cluster.run("srun", "--nodes=2", "--ntasks=3", "--kill-on-bad-exit=1", sys.executable, tmp_path / "fail.py")
    assert done.returncode != 0
    assert "ValueError: boom" in done.stderr


def test_the_example_is_a_job_that_slurm_would_start(cluster: Slurm) -> None:
    done = cluster.run("sbatch", "--test-only", EXAMPLE, "train.py")
    assert (done.returncode, "using 64 processors on nodes n[1-2]" in done.stderr) == (0, True), done.stderr


TRAIN = """
import os, subprocess, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
from fabric import Fabric

folder, restarts = sys.argv[1], int(os.environ.get("SLURM_RESTART_COUNT", 0))
fabric = Fabric(accelerator="cpu", strategy="ddp", precision="64-true")
fabric.launch()
torch.manual_seed(7)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
worked = iter(fabric.setup_dataloaders(DataLoader(range(10**9), num_workers=1)))  # SLURM signals its worker, too
step, last, deadline = 0, None, time.monotonic() + 100
if restarts:
    step = fabric.load(f"{folder}/checkpoint", {"model": model, "optimizer": optimizer})["step"]
    last = step + 5
while step != last and not fabric.should_stop:
    assert time.monotonic() < deadline, "no signal has come"
    batch = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    fabric.backward(model(batch[fabric.global_rank]).square().mean())
    optimizer.step()
    step += 1
    next(worked)
    if step == 3 and fabric.is_global_zero and not restarts:  # here by hand; at the time limit SLURM does the same
        signalled = f"trap '' USR1; exec scancel --signal=USR1 {os.environ['SLURM_JOB_ID']}"  # it is in the job itself
        subprocess.run(signalled, shell=True, check=True)
name = "result" if restarts else "checkpoint"
fabric.save(f"{folder}/{name}", {"model": model, "optimizer": optimizer, "step": step, "restarts": restarts})
if not restarts and fabric.is_global_zero:
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
if restarts and fabric.is_global_zero:
    open(f"{folder}/over", "w").write("over")
fabric.close()
"""


def test_a_signalled_job_saves_requeues_and_ends_with_the_numbers_of_one_never_stopped(
    cluster: Slurm, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    output, over = tmp_path / "output", tmp_path / "over"
    os.mkfifo(over)
    options = ("--parsable", "--ntasks-per-node=1", "--cpus-per-task=1", "--output", output)
    job = cluster.run("sbatch", *options, EXAMPLE, tmp_path / "train.py", tmp_path).stdout.strip()
    wait_for(over, cluster, output, job)
    content = read_checkpoint(tmp_path / "result")
    assert content["restarts"] == 1
    expected = train_in_one_process(content["step"])
    torch.testing.assert_close(content["model"], expected, rtol=1e-10, atol=1e-10)


def wait_for(pipe: Path, cluster: Slurm, output: Path, job: str) -> None:
    """Return once the job has written to the named pipe."""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ready, _, _ = select.select([reader], [], [], 110)
    os.close(reader)
    assert ready, cluster.run("scontrol", "show", "job", job).stdout + output.read_text()


def train_in_one_process(num_steps: int) -> dict[str, torch.Tensor]:
    """The weights after as many steps, in plain PyTorch, on the batches of both ranks together."""
    torch.manual_seed(7)
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(num_steps):
        batch = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch.flatten(0, 1)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def test_random_host_lists_are_parsed_as_by_scontrol(cluster: Slurm) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    lists = [",".join(drawn_hosts(draw) for _ in range(draw.randint(1, 3))) for _ in range(200)]
    ask = 'scontrol show hostnames "$list"'
    answers = cluster.run("sh", "-c", f'for list in "$@"; do {ask} | head -n 1; done', "-", *lists).stdout.split()
    assert [first_host(one) for one in lists] == answers


def drawn_hosts(draw: random.Random) -> str:
    """Hosts as SLURM writes them: up to two brackets, ranges and single numbers, with and without leading zeros."""
    brackets = [
        f"[{','.join(drawn_range(draw) for _ in range(draw.randint(1, 3)))}]" for _ in range(draw.randint(0, 2))
    ]
    return draw.choice(["n", "gpu-", "rack1-node"]) + draw.choice(["-ib", "x"]).join(brackets)


def drawn_range(draw: random.Random) -> str:
    first = draw.randint(0, 120)
    width = draw.choice([0, 3])
    return f"{first:0{width}d}" if draw.random() < 0.4 else f"{first:0{width}d}-{first + draw.randint(0, 9):0{width}d}"
