"""The bar of a long save or load."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from rich.console import Console

from fabric import Fabric
from fabric.output.progress.checkpoint import checkpoint_progress
from fabric.strategies.checkpoint.loading import load
from fabric.strategies.checkpoint.saving import save
from fabric.strategies.checkpoint.storage import Folder


@pytest.mark.parametrize(
    ("is_terminal", "after_seconds", "enabled", "is_shown"),
    [
        (True, 0, True, True),
        (True, float("inf"), True, False),
        (True, 0, False, False),
        (False, 0, True, False),
    ],
)
def test_a_progress_bar_is_shown_on_a_terminal_after_a_second(
    is_terminal: bool, after_seconds: float, enabled: bool, is_shown: bool
) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=100)
    with checkpoint_progress("save runs/7", enabled=enabled, after_seconds=after_seconds, console=console) as advance:
        advance(10_000, 20_000)
    assert ("save runs/7" in output.getvalue() and "10.0/20.0 kB" in output.getvalue()) is is_shown
    assert bool(output.getvalue()) is is_shown


def test_a_save_and_a_load_report_their_progress_up_to_the_last_byte(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(6400, dtype=torch.uint8), "b": torch.ones(1600)}
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        calls: list[tuple[int, int]] = []
        save(fabric.collective, Folder(tmp_path / "saved"), tensors, advance=lambda *each: calls.append(each))
        (file,) = (tmp_path / "saved").glob("*.bin")
        assert calls == [(6400, 12800), (12800, 12800)]
        assert file.stat().st_size == 12800
        calls.clear()
        load(fabric.collective, Folder(tmp_path / "saved"), advance=lambda *each: calls.append(each))
        assert calls == [(6400, 12800), (12800, 12800)]
