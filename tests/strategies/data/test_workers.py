"""Worker processes: random numbers of their own, the user's own start, and an end with their rank."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from shares import share_out
from torch.utils.data import DataLoader, Dataset, get_worker_info
from worlds import run_world

from fabric.launchers.world import World

Draw = tuple[int, int, int, int, int]


class Draws(Dataset[Draw]):
    """What each stream gives in the worker, and the seeds that users read there."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Draw:
        info = get_worker_info()
        assert info is not None
        drawn = int(torch.randint(2**31, ())), random.randrange(2**31), int(np.random.randint(2**31))
        return *drawn, torch.initial_seed(), info.seed


def draws(count: int, distribute: bool, num_workers: int = 2) -> list[list[Draw]]:
    def make(rank: int) -> DataLoader[Draw]:
        return DataLoader(Draws(), batch_size=2, num_workers=num_workers, collate_fn=list)

    shares = []
    for loader in share_out(make, count, distribute=distribute):
        torch.manual_seed(11)
        shares.append([sample for batch in loader for sample in batch])
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("distribute", [True, False])
def test_the_workers_of_two_ranks_draw_different_numbers(distribute: bool) -> None:
    first, second = draws(2, distribute)
    for stream in range(5):
        assert not {draw[stream] for draw in first} & {draw[stream] for draw in second}


@pytest.mark.slow
def test_what_a_batch_draws_does_not_depend_on_the_worker_that_loads_it() -> None:
    (of_one,), (of_two,) = draws(1, True, num_workers=1), draws(1, True, num_workers=2)
    assert [draw[:4] for draw in of_one] == [draw[:4] for draw in of_two]
    assert len({draw[0] for draw in of_one}) == len(of_one)


@pytest.mark.slow
def test_the_users_worker_init_fn_runs_last(tmp_path: Path) -> None:
    def init(worker_id: int) -> None:
        (tmp_path / str(os.getpid())).write_text(f"{worker_id} {torch.initial_seed()}")

    def make(rank: int) -> DataLoader[Draw]:
        return DataLoader(Draws(), batch_size=2, num_workers=2, collate_fn=list, worker_init_fn=init)

    seeds = {sample[4] for loader in share_out(make, 2) for batch in loader for sample in batch}
    told = [path.read_text().split() for path in tmp_path.iterdir()]
    assert sorted(worker for worker, _ in told) == ["0", "0", "1", "1"]
    assert {int(seed) for _, seed in told} == seeds


class Stuck(Dataset[int]):
    """Whose last sample a worker never returns."""

    def __init__(self, is_stuck: bool) -> None:
        self.is_stuck = is_stuck

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        while self.is_stuck and index == 63:
            signal.pause()
        return index


def below(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in below(child)]


def read_while_signalled(world: World, method: str) -> list[int]:
    """Read all samples; after the first batch a program sends each stop signal to all processes below this one."""
    (loader,) = share_out(lambda _: DataLoader(Stuck(False), 4, num_workers=2, multiprocessing_context=method), 1)
    read: list[int] = []
    for batch in loader:
        read += batch.tolist()
        if len(read) == 4:
            pids = [str(pid) for pid in below(os.getpid())]
            for name in ("USR1", "USR2", "TERM"):
                subprocess.run(["kill", f"-{name}", *pids], check=True)
    return read


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_signal_that_stops_the_job_ends_no_worker(method: str) -> None:
    assert run_world(1, read_while_signalled, method) == [list(range(64))]


def exits_in_mid_epoch(method: str) -> None:
    (loader,) = share_out(lambda _: DataLoader(Stuck(True), 4, num_workers=2, multiprocessing_context=method), 1)
    batches = iter(loader)
    for _ in range(15):
        next(batches)
    kept.append(batches)


kept: list[object] = []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_rank_that_exits_in_mid_epoch_ends_its_workers(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    rank = get_context("fork").Process(target=exits_in_mid_epoch, args=(method,))
    rank.start()
    rank.join()
    assert (rank.exitcode, capfd.readouterr().err) == (0, "")
