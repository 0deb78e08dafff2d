"""Two machines, two ranks each: network namespaces with a cable between them stand for the machines.

Needs root and iproute2. Where they are missing the test says so and is skipped; `.ci/run` has both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked_python import python

from fabric import read_checkpoint

SCRIPT = """
import sys
from fabric import Fabric

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, num_nodes=2)
fabric.launch()

from fabric.testing import cases, examine

findings = examine(fabric, [case for case in cases() if case.name in ("sgd", "load")], seed=int(sys.argv[2]))
seen = {finding.case: finding.result + finding.message for finding in findings}
places = fabric.all_gather({"node": fabric.node_rank, "local": fabric.local_rank, "rank": fabric.global_rank})
fabric.save(sys.argv[1], {"seen": seen, "places": places})
fabric.close()
"""


@dataclass(frozen=True)
class Node:
    """A machine: a namespace of its own, with one address on the cable."""

    namespace: str
    address: str

    def start(self, *command: str, **options: object) -> subprocess.Popen[str]:
        """Run a command on this machine."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *command], text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two nodes need root and iproute2 to make network namespaces, and one of them is missing here")
    name = f"fabric{os.getpid()}"
    both = Node(f"{name}a", "10.77.0.1"), Node(f"{name}b", "10.77.0.2")
    try:
        for node in both:
            _ip("netns", "add", node.namespace)
        _ip(
            "link",
            "add",
            "cable0",
            "netns",
            both[0].namespace,
            "type",
            "veth",
            "peer",
            "cable0",
            "netns",
            both[1].namespace,
        )
        for node in both:
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "cable0")
            for link in ("lo", "cable0"):
                _ip("-n", node.namespace, "link", "set", link, "up")
        yield both
    finally:
        for node in both:
            subprocess.run(["ip", "netns", "del", node.namespace], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _start(
    node: Node, rank: int, script: Path, main: Node, *arguments: str, stdout: int | None = None
) -> subprocess.Popen[str]:
    return node.start(
        *python(), "-m", "fabric", "run", "--node-rank", str(rank), "--main-address", main.address,
        "--main-port", "29511", str(script), *arguments,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, stdout=stdout, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    script, result = tmp_path / "train.py", tmp_path / "result"
    script.write_text(SCRIPT)
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    running = [_start(node, rank, script, nodes[0], str(result), str(seed)) for rank, node in enumerate(nodes)]
    for process in running:
        _, outputs = process.communicate(timeout=100)
        assert process.returncode == 0, outputs
    content = read_checkpoint(result)
    assert content["places"]["node"].tolist() == [0, 0, 1, 1]
    assert content["places"]["local"].tolist() == [0, 1, 0, 1]
    assert content["places"]["rank"].tolist() == [0, 1, 2, 3]
    assert content["seen"] == {"sgd": "equal", "load": "equal"}


FAILING = """
from fabric import Fabric

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, num_nodes=2)
fabric.launch()
if fabric.global_rank == 3:
    raise ValueError("boom on the second node")
fabric.barrier()
"""


@pytest.mark.slow
def test_a_failure_on_one_node_ends_the_other(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    running = [_start(node, rank, script, nodes[0]) for rank, node in enumerate(nodes)]
    outputs = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode != 0 for process in running] == [True, True]
    assert outputs[1].strip().endswith("ValueError: boom on the second node")


LOSING = """
import torch
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, report_after_seconds=0.5)
fabric.launch()
fabric.barrier()
print("begun", flush=True)
while True:
    fabric.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_ranks_that_wait_for_a_lost_machine_fail_long_before_their_timeout(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOSING)
    running = [_start(node, rank, script, nodes[0], stdout=subprocess.PIPE) for rank, node in enumerate(nodes)]
    for process in running:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    _ip("-n", nodes[1].namespace, "link", "set", "cable0", "down")
    output = running[0].communicate(timeout=100)[1]
    assert running[0].returncode == 1
    assert "RuntimeError: A collective of all ranks waits for a rank that has ended or cannot be reached" in output
    assert ": cannot be reached" in output
    running[1].terminate()  # the store was on the machine that it has lost: it waits for its timeout
    running[1].communicate(timeout=60)
