"""torchrun, the real one: on two machines, and with restarts."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_python import python
from machines import Machine, machines, why_not
from processes import run

PLACE = """
import json, os
import torch
from fabric import Fabric
from fabric.launchers import detect_world

fabric = Fabric(accelerator="cpu", strategy="ddp")
fabric.launch()
world = detect_world(os.environ)
print(json.dumps({
    "launcher": world.launcher, "attempt": world.rendezvous.attempt,
    "rank": fabric.global_rank, "local_rank": fabric.local_rank, "node_rank": fabric.node_rank,
    "sum": fabric.all_reduce(torch.tensor(2.0 ** fabric.global_rank), reduce_op="sum").item(),
}) + "\\n", end="", flush=True)
if world.rendezvous.attempt < int(os.environ.get("FAILURES", 0)) and fabric.global_rank == 1:
    raise ValueError("boom")
fabric.barrier()
fabric.close()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
MISSING = why_not()
pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place.py").write_text(PLACE)
    return tmp_path / "place.py"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Machine, ...]]:
    if MISSING is not None:
        pytest.skip(f"`make test-clusters` runs this; here: {MISSING}")
    with machines(("n1", "n2"), tmp_path) as both:
        yield both


def test_two_nodes_are_one_world(nodes: tuple[Machine, ...], place: Path) -> None:
    meet = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500", "--no-python", *python())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(node.start(*python(), *TORCHRUN, *meet, place, **pipes)) for node in nodes]
        for agent in agents:
            stack.callback(agent.kill)
        outputs = [agent.communicate(timeout=110) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    found = [json.loads(line) for output, _ in outputs for line in output.splitlines()]
    assert {(one["sum"], one["launcher"], one["attempt"]) for one in found} == {(15.0, "torchelastic", 0)}
    assert sorted((one["rank"], one["node_rank"], one["local_rank"]) for one in found) == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]


def test_after_a_restart_the_ranks_connect_again_and_have_their_attempt(place: Path) -> None:
    done = run([*TORCHRUN, "--max-restarts=2", "--no-python", *python(), place], FAILURES="2")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((one["attempt"], one["rank"]) for one in found) == [
        (attempt, rank) for attempt in range(3) for rank in range(2)
    ]
    assert {one["sum"] for one in found} == {3.0}
    assert done.stderr.count("ValueError: boom") >= 2


def test_without_restarts_left_the_failure_is_torchruns(place: Path) -> None:
    done = run([*TORCHRUN, "--max-restarts=0", "--no-python", *python(), place], FAILURES="1")
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
