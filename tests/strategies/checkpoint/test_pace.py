"""Writes through and past the page cache: what is in the file, and who waits."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fabric.strategies.checkpoint.background import BackgroundSaves
from fabric.strategies.checkpoint.memory import buffer_of
from fabric.strategies.checkpoint.storage import Folder
from fabric.strategies.checkpoint.writers import PAGE_BYTES, DirectWriter, Pace, start_writeback
from fabric.strategies.collectives.single import SingleDeviceCollective


def hurried() -> Pace:
    pace = Pace()
    pace.hurry()
    return pace


def drawn_blocks(seed: int) -> Iterator[memoryview]:
    """Of all lengths, in memory that is at pages, beside them, or cannot be written to."""
    draw = random.Random(seed)
    memory = torch.randint(
        256, (2**23 + 2 * PAGE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    first = -memory.data_ptr() % PAGE_BYTES
    for _ in range(12):
        start = first + draw.choice([0, PAGE_BYTES, 64, 1])
        length = draw.choice([0, 1, 60, PAGE_BYTES - 60, PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 7, 2**22, 2**23])
        block = buffer_of(memory[start : start + length])
        yield memoryview(block.tobytes()) if draw.random() < 0.2 else block


@pytest.mark.parametrize("makes_pace", [hurried, lambda: None], ids=["past the cache", "through it"])
@pytest.mark.parametrize("seed", range(8))
def test_the_file_has_the_blocks_one_after_another(
    tmp_path: Path, seed: int, makes_pace: Callable[[], Pace | None]
) -> None:
    blocks = list(drawn_blocks(seed))
    Folder(tmp_path).write("file", blocks, pace=makes_pace())
    assert (tmp_path / "file").read_bytes() == b"".join(blocks)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has sync_file_range")
def test_the_disk_begins_to_write_a_file_before_its_flush(tmp_path: Path) -> None:
    with (tmp_path / "file").open("xb", buffering=0) as file:
        file.write(bytes(3 * PAGE_BYTES))
        assert start_writeback(file.fileno(), PAGE_BYTES, PAGE_BYTES)
    read, write = os.pipe()
    assert not start_writeback(write, 0, PAGE_BYTES)
    os.close(read)
    os.close(write)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has O_DIRECT")
def test_pages_are_written_past_the_cache_and_the_end_of_the_file_through_it(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / "file").open("xb", buffering=0) as file:
        writer = DirectWriter(file.fileno(), hurried())
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        writer.write(memoryview(bytes(PAGE_BYTES + 1)))
        writer.end()
        assert not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
    assert (tmp_path / "file").read_bytes() == bytes(PAGE_BYTES + 1)


def test_where_the_system_refuses_a_block_the_file_is_written_through_the_cache(tmp_path: Path) -> None:
    with (tmp_path / "file").open("xb", buffering=0) as file:
        file.write(b"1")  # from here on no block is at a page of the file
        writer = DirectWriter(file.fileno(), hurried())
        blocks = list(drawn_blocks(1))
        for block in blocks:
            writer.write(block)
        writer.end()
    assert (tmp_path / "file").read_bytes() == b"1" + b"".join(blocks)


@pytest.mark.skipif(sys.platform != "linux", reason="a device of Linux")
def test_a_full_disk_raises() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        writer = DirectWriter(file.fileno(), hurried())
        writer.write(memoryview(b"1"))
        with pytest.raises(OSError, match="No space left"):
            writer.end()


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
