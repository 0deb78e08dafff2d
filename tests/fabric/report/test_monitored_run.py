"""The monitor writes, and the report reads: a run of two ranks, one of which is late in saving."""

from pathlib import Path

import pytest
from delays import Delay, train
from worlds import preload

from fabric import Fabric
from fabric.report.page import page
from fabric.report.run import read


@pytest.mark.slow
def test_the_page_of_a_monitored_run_names_the_late_rank_and_has_settings_and_saves(tmp_path: Path) -> None:
    preload("delays")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", sanitize=False, launcher="forkserver")
    fabric.launch(train, Delay("saving", seconds=0.6), tmp_path, 9, window_steps=5, show=False)
    run = read(tmp_path)
    assert run.notes == []
    assert [line["kind"] for line in run.lines] == ["start", "peak", "save", "window", "save", "end"]
    assert [line["step"] for line in run.of("save")] == [4, 8]
    assert {"devices", "strategy"} < {setting["name"] for setting in run.settings}
    assert run.doctor["accelerators"]
    assert [checkpoint["step"] for checkpoint in run.checkpoints] == [8]
    html = " ".join(page([run]).split())
    assert "<td>1</td><td>saving</td><td>1</td>" in html
    assert "steps 4, 8" in html
    assert "DDPStrategy" in html
