"""How much memory saving and loading take, beyond the model itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.thorough
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
@pytest.mark.thorough
@pytest.mark.parametrize("strategies", [["fsdp"], ["deepspeed_stage_3", "ddp_fully_sharded"]], ids=", ".join)
def test_ranks_with_shards_copy_nothing_unsharded_when_they_save_and_load(
    tmp_path: Path, strategies: list[str]
) -> None:
    program = Path(__file__).with_name("peaks_of_ranks.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), *strategies],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)},  # memory that is freed is given back at once
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert [*found] == strategies
    for strategy, ranks in found.items():
        for rank, peaks in enumerate(ranks):
            shards, few_tensors = 96, 24  # in MB: what a rank has of the state, and six unsharded tensors
            assert peaks["saving"] < few_tensors, (strategy, rank, peaks)
            assert peaks["in the background"] < shards + few_tensors, (strategy, rank, peaks)  # the staging memory
            assert peaks["once more"] < few_tensors, (strategy, rank, peaks)
            # The optimizer gets new tensors: 64 MB of shards, beside those that it has until it has all.
            assert peaks["loading"] < 64 + few_tensors, (strategy, rank, peaks)
            assert peaks["loading before a step"] < 64 + few_tensors, (strategy, rank, peaks)
            assert peaks["in memory"] < (192 if rank == 0 else 0) + few_tensors, (strategy, rank, peaks)
            assert rank > 0 or peaks["in memory"] > 180, (strategy, peaks)
            assert peaks["in the background"] > 80, (strategy, rank, peaks)
