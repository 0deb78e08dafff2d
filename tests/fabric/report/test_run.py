"""Folders of runs that are damaged, of another program, or have little in them."""

import json
import os
import sys
from pathlib import Path

import pytest

from fabric.cli import main
from fabric.report.run import read

START = '{"kind": "start", "time": 1.0, "num_ranks": 1}\n'
WINDOW = '{"kind": "window", "time": 2.0, "step": 20, "num_steps": 20, "metrics": {}, "ranks": [], "slow": null}\n'


def monitored(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "monitor.jsonl").write_text(text)
    return folder


def test_a_last_line_that_a_kill_has_cut_off_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = read(monitored(tmp_path, START + WINDOW + WINDOW[:40]))
    assert [line["kind"] for line in run.lines] == ["start", "window"]
    assert run.notes == ["Line 3 of monitor.jsonl is cut off, as by a kill while it was written; the others are shown."]


def test_a_damaged_line_within_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = read(monitored(tmp_path, START + WINDOW[:40] + "\n" + START + WINDOW))
    assert [line["kind"] for line in run.lines] == ["start", "start", "window"]
    assert run.notes == [
        "Line 2 of monitor.jsonl cannot be read, as by a kill while it was written; the others are shown."
    ]


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    assert read(monitored(tmp_path, START)).notes == ["No steps: the run ended before its first window of steps."]


def test_a_description_that_is_damaged_is_named(tmp_path: Path) -> None:
    (monitored(tmp_path, START + WINDOW) / "run.json").write_text('{"settings": [')
    assert read(tmp_path).notes == ["run.json cannot be read; the rest is shown."]


def test_metrics_of_another_program_are_left_out(tmp_path: Path) -> None:
    (monitored(tmp_path, START + WINDOW) / "metrics.csv").write_text("epoch,loss\n1,2\n")
    run = read(tmp_path)
    assert run.series == {}
    assert run.notes == [
        f"`{tmp_path / 'metrics.csv'}` is not shown: its first column is not `step`, so `CSVLogger` has not written it."
    ]


def test_the_metrics_of_a_run_that_was_restarted_are_one_run(tmp_path: Path) -> None:
    for version, rows in enumerate(("1,4\n2,3\n", "2,5\n")):
        file = tmp_path / f"version_{version}/metrics.csv"
        file.parent.mkdir()
        file.write_text(f"step,loss\n{rows}")
        os.utime(file, (version, version))
    run = read(tmp_path)
    assert str(run.series["loss"]) == "[(1.0, 4.0), (2.0, 3.0), (2.0, nan), (2.0, 5.0)]"
    assert run.notes[0] == (
        "Metrics of 2 files are shown as one run, in this order: version_0/metrics.csv, version_1/metrics.csv."
    )


def test_windows_in_which_a_late_rank_may_be_unnamed_are_counted(tmp_path: Path) -> None:
    unknown = WINDOW.replace('"slow": null', '"slow": null, "unknown": "Busy machine: a rank may be late."')
    run = read(monitored(tmp_path, START + unknown + WINDOW))
    assert run.notes == ["1 of 2 windows: Busy machine: a rank may be late."]


def test_failures_have_their_times_and_whole_messages(tmp_path: Path) -> None:
    (tmp_path / "failures.log").write_text("# 2026-01-01 10:00:00: one\n\nTraceback\n# 2026-01-01 10:00:30: two\n")
    (first, words), (second, others) = read(tmp_path).failures
    assert second - first == 30
    assert (words, others) == ("one\n\nTraceback", "two")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "`{0}` is not a folder. Write that of a run: `fabric.monitor(folder=...)`, or `log_dir`."),
        (
            "",
            "`{0}` is not the folder of a run of fabric: it has neither monitor.jsonl nor run.json, metrics.csv, "
            "failures.log, traces or checkpoints. `fabric.monitor(folder='{0}')` writes the first two.",
        ),
        (
            json.dumps({"event": "loss", "value": 1}),
            "`{0}/monitor.jsonl` was not written by `fabric.monitor`: its line 1 has no `kind`.",
        ),
    ],
)
def test_a_folder_of_another_program_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    folder = tmp_path / "other"
    if content is not None:
        folder.mkdir()
        (folder / ("monitor.jsonl" if content else "notes.txt")).write_text(content)
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr() == ("", f"fabric report: {words.format(folder)}\n")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "fabric report: `fabric report` needs matplotlib, which is not installed. Run `pip install "
        "'torchfabric[report]'`.\n"
    )
