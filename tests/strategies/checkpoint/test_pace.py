"""What is in the file of a save, and how long one in the background rests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fabric.strategies.checkpoint.background import BackgroundSaves
from fabric.strategies.checkpoint.memory import buffer_of
from fabric.strategies.checkpoint.pace import Pace
from fabric.strategies.checkpoint.storage import Folder
from fabric.strategies.collectives.single import SingleDeviceCollective


def hurried() -> Pace:
    pace = Pace()
    pace.hurry()
    return pace


@pytest.mark.parametrize("makes_pace", [hurried, lambda: None], ids=["in the background", "at once"])
def test_the_file_has_the_blocks_one_after_another(tmp_path: Path, makes_pace: Callable[[], Pace | None]) -> None:
    memory, blocks = torch.arange(2**16, dtype=torch.uint8), []
    for length in (0, 1, 60, 4096, 4097, 2**16):
        start = random.randrange(2**16 - length + 1)
        blocks.append(buffer_of(memory[start : start + length]))
    Folder(tmp_path).write("file", blocks, pace=makes_pace())
    assert (tmp_path / "file").read_bytes() == b"".join(blocks)


def test_a_save_rests_until_somebody_waits_for_it() -> None:
    pace, rested = Pace(), threading.Event()

    def write() -> None:
        pace.rest(1000.0)
        rested.set()

    threading.Thread(target=write, daemon=True).start()
    assert not rested.wait(0.05)
    pace.hurry()
    assert rested.wait(5)


def test_a_save_rests_no_longer_than_its_limit() -> None:
    pace = Pace()
    pace.limit(0.05)
    begun = time.monotonic()
    for _ in range(1000):
        pace.rest(1000.0)
    assert 0.04 < time.monotonic() - begun < 20


def test_saves_that_follow_one_another_rest_for_half_of_the_time_between_them(tmp_path: Path) -> None:
    saves, begun = BackgroundSaves(SingleDeviceCollective()), []
    for number in range(2):
        begun.append(time.monotonic())
        pending = saves.start(Folder(tmp_path / str(number)), {"x": torch.zeros(3)})
        saves.finish()
    assert pending._pace._left_seconds < (begun[1] - begun[0]) / 2 + 1
