"""horovodrun, the real one, on two machines, which it reaches by ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import python
from machines import machines, ssh, why_not

MISSING = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=f"`make test-horovod` runs these; here: {MISSING}"),
]

PROGRAM = """
import json, os, sys
from socket import gethostname
import torch
from fabric import Fabric
from fabric.launchers import detect_world

with Fabric(accelerator="cpu", strategy="horovod") as fabric:
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(1, 1, bias=False))
    fabric.backward(model(torch.tensor([[2.0 ** fabric.global_rank]])).sum())
    world = detect_world(os.environ)
    place = [fabric.global_rank, gethostname(), fabric.node_rank, fabric.local_rank, world.local_size, world.launcher]
    sys.stdout.write(json.dumps([*place, fabric.world_size, model.weight.grad.item()]) + "\\n")
"""


def test_ranks_on_two_nodes_average_their_gradients_over_horovod(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ("--gloo", "--disable-cache", "-np", "4", "-H", "n1:2,n2:2", *python(), tmp_path / "program.py")
    with machines(("n1", "n2"), tmp_path) as nodes:
        ssh(nodes, tmp_path)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "MASTER_ADDR": "n1", "OMP_NUM_THREADS": "1"}
        program = Path(sys.executable).with_name("horovodrun")
        done = nodes[0].run(program, *command, env=environ, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [
        line.partition("<stdout>:")[2] for line in done.stdout.splitlines()
    ]  # without the rank, which horovodrun writes
    assert sorted(json.loads(line) for line in lines if line.startswith("[")) == [
        [0, "n1", 0, 0, 2, "horovod", 4, 3.75],
        [1, "n1", 0, 1, 2, "horovod", 4, 3.75],
        [2, "n2", 1, 0, 2, "horovod", 4, 3.75],
        [3, "n2", 1, 1, 2, "horovod", 4, 3.75],
    ]
