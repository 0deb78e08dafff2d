"""`fabric doctor` where Horovod is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def doctor() -> dict[str, Any]:
    command = [sys.executable, "-m", "fabric", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_strategy_runs_here() -> None:
    found = doctor()
    (horovod,) = (row for row in found["strategies"] if row["name"] == "horovod")
    assert (horovod["runs_on"], horovod["why_not"]) == (["cpu"], None)
