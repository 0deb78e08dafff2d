"""The page of a run, as a real browser without a network shows it. Pictures: `.pytest_cache/pictures`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser

from fabric.cli import main

START = 1_764_360_000.0
PHASES = {
    "data": 0.01,
    "forward": 0.02,
    "backward": 0.03,
    "optimizer": 0.01,
    "waiting": 0.02,
    "saving": 0.0,
    "other": 0.01,
}


def window(step: int, *, num_ranks: int = 2, slow: Any = None, **metrics: float) -> dict[str, Any]:
    """A window of 20 steps, as `fabric.monitor` writes it."""
    phases = {f"{name}_seconds": seconds for name, seconds in PHASES.items()}
    numbers = {
        "step_seconds": 0.1,
        **phases,
        "steps_per_second": 10.0,
        "samples_per_second": 640.0,
        "flops_per_second": 2e12,
        "mfu": 0.41,
        "loss": 2.0 / step + 0.1,
        "gradient_norm": 1.0,
        "learning_rate": 0.1 - step / 10_000,
        "host_memory_bytes": 2.0**30,
        "host_memory_peak_bytes": 1.5 * 2.0**30,
    }
    ranks = [{"rank": rank, "step_seconds": 0.1, **phases} for rank in range(num_ranks)]
    line = {"kind": "window", "time": START + step / 10, "step": step, "num_steps": 20}
    return {**line, "metrics": {**numbers, **metrics}, "ranks": ranks, "slow": slow}


def start(time: float = START, **fields: Any) -> dict[str, Any]:
    line = {"kind": "start", "time": time, "num_ranks": 2, "num_nodes": 1, "strategy": "DDPStrategy"}
    return {
        **line,
        "precision": "32-true",
        "device_name": "CPU",
        "torch": "2.13.0",
        **fields,
    }


def write(folder: Path, *lines: dict[str, Any], end: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def describe(folder: Path, **settings: str) -> None:
    rows = [{"name": name, "value": value, "source": "argument"} for name, value in settings.items()]
    rows.append({"name": "bucket_bytes", "value": "1000", "source": "default"})
    machine: dict[str, Any] = {"python": "3.11", "torch": "2.13.0", "system": "Linux", "cores": 2, "started_by": None}
    machine["accelerators"] = [{"name": "cpu", "devices": 1, "why_not": None}]
    machine["strategies"] = [
        {"name": "DDPStrategy", "precisions": {"cpu": ["32-true"]}, "why_not": None, "lacks": {"unused": "because"}}
    ]
    (folder / "run.json").write_text(json.dumps({"settings": rows, "doctor": machine}))


def whole(folder: Path, **settings: str) -> Path:
    """A run of everything: a failure, a restart, saves, skipped steps, a slow rank, a trace and a checkpoint."""
    slow = {"rank": 1, "phase": "backward", "seconds": 0.05, "share": 0.3, "is_passing": False}
    write(
        folder,
        start(),
        {
            "kind": "peak",
            "time": START,
            "flops_per_step": 1.2e9,
            "peak_flops_per_second": 9.89e14,
            "peak_source": "NVIDIA H100",
        },
        *({"kind": "sanitizer", "time": START + step / 10, "step": step} for step in (1, 2, 3, 4, 8)),
        *(window(step) for step in range(20, 400, 20)),
        {"kind": "save", "time": START + 39, "step": 390, "seconds": 1.2, "path": "checkpoint", "is_blocking": True},
        {"kind": "skipped", "time": START + 39, "step": 395},
        start(START + 60),
        {"kind": "load", "time": START + 61, "step": 390},
        *(window(step, slow=slow) for step in range(400, 600, 20)),
        {"kind": "end", "time": START + 90, "step": 600},
    )
    describe(folder, **settings)
    (folder / "failures.log").write_text(
        "# 2025-11-28 20:00:50: rank 0 of 2, 4 ms later\nrank 1 of 2 failed first: ValueError: boom <b>\n\nTraceback\n"
    )
    saved = folder / "checkpoints" / "000001-step-390-metric-0.25"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text('"torchfabric checkpoint"')
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "manifest.json").write_text('"torchfabric checkpoint"')
    rank = {"host": "a", "seconds": 0.2, "compute_seconds": 0.1, "collective_seconds": 0.05, "num_collectives": 4}
    ranks = [{"rank": number, **rank, "overlapped_seconds": 0.03, "exposed_seconds": 0.02} for number in (0, 1)]
    (folder / "trace-10-11.summary.json").write_text(
        json.dumps({"steps": [10, 11], "file": "trace-10-11.json.gz", "ranks": ranks})
    )
    return folder


def shown(page: Page, file: Path, **options: Any) -> str:
    """The text of the page, which asks for nothing and has no errors."""
    page.open(file, **options)
    assert page.errors == []
    assert page.requests == [file.resolve().as_uri()]
    return page.text()


def colors(page: Page, selector: str) -> tuple[str, str]:
    """The colours of the page and of the text of an element."""
    paper: str = page.run("getComputedStyle(document.body).backgroundColor")
    ink: str = page.run(f'getComputedStyle(document.querySelector("{selector}")).fill')
    return paper, ink


def test_the_page_of_a_run_in_light_in_dark_and_in_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole(tmp_path / "runs" / "7", devices="2")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr() == (f"{folder / 'report.html'}\n", "")
    file = folder / "report.html"
    with browser(tmp_path) as page:
        text = shown(page, file)
        page.picture("report-light")
        titles = page.run('[...document.querySelectorAll("h2, figcaption")].map(each => each.textContent)')
        assert titles == [
            "Settings",
            "The run",
            "Loss and learning rate",
            "Norm of the gradient",
            "Samples a second",
            "Model FLOPs utilization",
            "Seconds a step",
            "Memory, greatest of all ranks",
            "Where the time of a step goes",
            "Ranks: where the time of each goes",
            "Ranks for which the others waited",
            "Traces: computation and collectives",
            "What happened when",
            "Failures",
            "Checkpoints",
            "The machine",
        ]
        for words in (
            "devices\t2\targument",
            "989 TFLOP/s (NVIDIA H100)",
            "last mfu\t0.41",
            "1\tbackward\t10\t50 ms\tstays",
            "1\t200\t100\t50\t30\t20",
            "sanitizer\tsteps 1, 2, 3, 4, 8",
            "save\tsteps 390, 1.2 s in all",
            "skipped\tsteps 395",
            "restart\t2 ranks after step 380",
            "load\tstep 390",
            "failure\trank 1 of 2 failed first: ValueError: boom <b>",
            "checkpoints/000001-step-390-metric-0.25\t390\t0.25\t24\t",
            "checkpoint\t390\t\t24\t",
            "Unsupported: unused.",
        ):
            assert words in text, words
        assert "bucket_bytes" not in text  # folded away, as all defaults are
        assert page.run('document.querySelectorAll("svg").length') == 8
        # Each plot is as wide as the page, and is drawn: a curve has a length.
        assert (
            page.run(
                'Math.min(...[...document.querySelectorAll("svg")].map(each => each.getBoundingClientRect().width))'
            )
            > 900
        )
        assert (
            page.run('[...document.querySelectorAll("svg path")].filter(each => each.getTotalLength() > 50).length')
            > 20
        )
        white, ink = colors(page, "svg text")
        assert (white, ink) == ("rgb(255, 255, 255)", "rgb(28, 32, 36)")
        shown(page, file, scheme="dark")
        page.picture("report-dark")
        assert colors(page, "svg text") == ("rgb(20, 23, 26)", "rgb(230, 233, 236)")
        assert "bucket_bytes" in shown(page, file, scheme="dark", media="print", width=794)
        page.picture("report-print")
        assert colors(page, "svg text") == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
        assert page.run("document.documentElement.scrollWidth") <= 794  # nothing is cut off on paper
        assert page.pdf().startswith(b"%PDF")
        shown(page, file, width=390)
        assert page.run("document.documentElement.scrollWidth") <= 390
    assert file.stat().st_size < 300_000
    assert not re.search(r"(src|href)=[\"']?http|<script|@import|url\((?!#)", file.read_text())


def test_two_runs_stand_side_by_side_with_the_differences_of_their_settings_first(tmp_path: Path) -> None:
    one = whole(tmp_path / "runs" / "a", strategy="DDPStrategy", devices="2", precision="32-true")
    other = whole(tmp_path / "runs" / "b", strategy="FSDPStrategy", devices="2", loggers="CSVLogger")
    assert main(["report", str(one), str(other), "--out", str(tmp_path / "both.html")]) == 0
    with browser(tmp_path) as page:
        shown(page, tmp_path / "both.html")
        page.picture("report-two")
        assert page.run('document.querySelector("h2").textContent') == "Settings that differ"
        assert page.run('document.querySelector("#differences tbody").innerText').splitlines() == [
            "strategy\tDDPStrategy\targument\tFSDPStrategy\targument",
            "precision\t32-true\targument\tnot set\t",
            "loggers\tnot set\t\tCSVLogger\targument",
        ]
        left, right = page.run(
            '[...document.querySelectorAll(".runs > div")].slice(0, 2).map(each => each.getBoundingClientRect().x)'
        )
        assert left < 200 < right
        titles = page.run('[...document.querySelector("svg").querySelectorAll("text")].map(each => each.textContent)')
        assert {"runs/a", "runs/b"} <= set(titles)


def test_equal_settings_are_said_to_be_equal(tmp_path: Path) -> None:
    runs = [str(whole(tmp_path / name, devices="2")) for name in ("a", "b")]
    assert main(["report", *runs]) == 0
    with browser(tmp_path) as page:
        assert "Settings that differ\n\nNone: all settings are equal." in shown(page, tmp_path / "a/report.html")


def test_a_long_run_of_many_ranks_is_a_small_page(tmp_path: Path) -> None:
    noisy = [window(step, num_ranks=64, loss=2 + math.sin(step)) for step in range(20, 40_000, 20)]
    folder = write(tmp_path / "long", start(num_ranks=64), *noisy)
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").stat().st_size < 1_500_000
    with browser(tmp_path) as page:
        text = shown(page, folder / "report.html")
        page.picture("report-long")
        assert "64 on 1 node" in text
        assert (
            page.run(
                '[...document.querySelectorAll("svg text")].filter(each => each.textContent.startsWith("rank ")).length'
            )
            == 32
        )


def test_a_run_without_a_monitor_shows_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "plain"
    (folder / "version_0").mkdir(parents=True)
    (folder / "version_0" / "metrics.csv").write_text(
        "step,train_loss,monitor/mfu\n1,0.5,0.1\n2,0.25,\n3,half,\n4,0.1,0.2\n"
    )
    assert main(["report", str(folder)]) == 0
    warned = capsys.readouterr().err.splitlines()
    assert warned == [
        f"{folder}: Line 4 of version_0/metrics.csv cannot be read; the others are shown.",
        f"{folder}: No monitor.jsonl: the run had no `fabric.monitor(...)`: times, memory and ranks are not known.",
    ]
    with browser(tmp_path) as page:
        text = shown(page, folder / "report.html")
        titles = page.run('[...document.querySelectorAll("figcaption")].map(each => each.textContent)')
        assert titles == ["Model FLOPs utilization", "train_loss"]  # a logger has the monitor's numbers, too
        assert all(line.partition(": ")[2] in text for line in warned)
