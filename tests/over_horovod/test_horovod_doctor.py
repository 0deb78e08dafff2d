"""`fabric doctor` where Horovod and Open MPI are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def doctor(path: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fabric", "doctor", "--json"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_is_installed_runs_and_what_is_not_on_path_is_found_beside_python() -> None:
    scripts = sysconfig.get_path("scripts")
    found = doctor(path=scripts)
    (horovod,) = (row for row in found["strategies"] if row["name"] == "horovod")
    assert (horovod["runs_on"], horovod["why_not"]) == (["cpu"], None)
    here = {row["name"] for row in found["clusters"] if row["why_not"] is None}
    assert here >= {"torchelastic", "mpi", "horovod"}
    elsewhere = {row["name"]: row["why_not"] for row in doctor(path="")["clusters"]}
    for name, program in (("torchelastic", "torchrun"), ("mpi", "mpirun"), ("horovod", "horovodrun")):
        assert elsewhere[name] == (
            f"`{program}` is next to this Python, but not on PATH: `export PATH={scripts}:$PATH`."
        )
