"""What ranks that are forks share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fabric.launchers.process.os_process import num_cores

PROGRAM = """
import sys
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=int(sys.argv[1]), launcher="fork")
fabric.launch()
assert "torch._dynamo" in sys.modules
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_more_ranks_than_cores_find_what_the_first_optimizer_imports() -> None:
    """In a fresh interpreter: the template of other tests has imported it."""
    command = [sys.executable, "-c", PROGRAM, str(num_cores() + 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
