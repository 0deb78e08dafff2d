"""How much memory saving and loading take, beyond the model itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
def test_a_blocking_save_copies_nothing_and_background_saves_reuse_one_copy(tmp_path: Path) -> None:
    program = Path(__file__).with_name("peaks.py")
    done = subprocess.run([sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    assert peaks["state"] == 128
    assert peaks["saving"] < 24, peaks
    assert 120 < peaks["in the background"] < 152, peaks  # the staging memory
    assert peaks["once more"] < 24, peaks
    assert peaks["loading"] < 152, peaks  # pages of the mapped file, which the kernel may drop
