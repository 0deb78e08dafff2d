"""Ranks that end one after the other, or with a collective under way: none aborts, and the job ends well."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR
from torch import nn

from fabric import Fabric


def wait_in_a_collective() -> None:
    dist.all_reduce(torch.ones(4))


def end(fabric: Fabric, place: str) -> int:
    """Train, and end; rank 1 ends late, or as `place` says."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    pids: list[Any] = fabric.collective.all_gather_object(os.getpid())
    is_late = fabric.global_rank == 1
    if place == "stopped while rank 0 closes" and not is_late:
        os.kill(pids[1], signal.SIGSTOP)
        fabric.close()
        subprocess.Popen(["sh", "-c", f"sleep 0.4; kill -CONT {pids[1]}"], start_new_session=True)
    elif place == "closes late" and is_late:
        time.sleep(0.3)
        fabric.close()
    elif place == "a collective under way" and is_late:
        dist.all_reduce(torch.ones(4), async_op=True)
        fabric.close()
    elif place == "a thread in a collective" and is_late:
        threading.Thread(target=wait_in_a_collective, daemon=True).start()
        time.sleep(0.1)
    return 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp_fully_sharded", pytest.param("deepspeed_stage_2", marks=pytest.mark.thorough)]
)
def test_no_rank_aborts_where_another_one_ends_earlier_or_later(strategy: str) -> None:
    for place in ("closes late", "stopped while rank 0 closes", "a collective under way", "a thread in a collective"):
        fabric = Fabric(
            accelerator=ACCELERATOR,
            devices=2,
            strategy=strategy,
            launcher="forkserver",
            timeout_seconds=20,
            sanitize=False,  # which compares a watched step in `close`, to which all ranks then come
        )
        assert fabric.launch(end, place) == 1, place
