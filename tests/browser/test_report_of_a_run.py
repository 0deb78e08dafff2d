"""The report of a real run of two processes that fails: what its own parts have written is on the page."""

from pathlib import Path

import pytest
from browser import browser
from processes import run

from fabric.cli import main

PROGRAM = """
import sys
import torch
from fabric import CheckpointDirectory, CSVLogger, Fabric

def main(fabric, folder):
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.trace(steps=range(2, 4))
    saved = CheckpointDirectory(f"{folder}/checkpoints")
    for step in range(1, 6):
        loss = model(torch.ones(2, 4)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log("train_loss", loss, step)
    saved.save(fabric, {"model": model}, step=5, metric=0.5)
    if fabric.global_rank == 1:
        raise ValueError("boom")
    fabric.barrier()

if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy="ddp", loggers=CSVLogger(sys.argv[1])).launch(main, sys.argv[1])
"""


@pytest.mark.slow
def test_a_run_that_fails_is_reported_with_its_failure_trace_metrics_and_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(["-m", "fabric", "run", "--log-dir", folder, tmp_path / "program.py", folder])
    assert done.returncode == 1, done.stderr
    assert "ValueError: boom" in done.stderr
    assert main(["report", str(folder)]) == 0
    with browser(tmp_path) as page:
        page.open(folder / "report.html")
        page.picture("report-of-a-run")
        text = page.text()
        assert page.errors == []
        assert page.run('[...document.querySelectorAll("figcaption")].map(each => each.textContent)') == ["train_loss"]
        assert "failure\trank 1 of 2 failed first: ValueError: boom" in text
        assert 'raise ValueError("boom")' in text  # the traceback
        assert "Steps 2 to 3: trace-2-3.json.gz" in text
        assert "checkpoints/000001-step-5-metric-0.5\t5\t0.5\t" in text
        rows = page.run('[...document.querySelectorAll("section")].length')
        assert rows == 6  # settings, traces, what happened when, failures, checkpoints, the machine
        assert "devices\t0, 1\targument" in text
        assert f"log_dir\t{folder}\tcommand line" in text
