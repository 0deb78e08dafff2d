"""`fabric doctor`: the report, and its two shows."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest
import template
import torch

from fabric.configure.abilities import report
from fabric.configure.machine import Found, Machine
from fabric.launchers.process.program import Program
from fabric.launchers.world import World
from fabric.strategies import DDPStrategy, available_strategies
from fabric.strategies.accelerators import CPUAccelerator, TorchAccelerator
from fabric.strategies.registered_names import Registration
from fabric.strategies.strategy_registry import strategy_registrations

CPU = Found(accelerator=CPUAccelerator(), num_devices=1)
CUDA = Found(accelerator=TorchAccelerator("cuda"), num_devices=2)
OF_TORCH = {name: strategy_registrations()[name] for name in ("single_device", "dp", "ddp", "ddp_spawn", "ddp_fork")}
"""The strategies that need nothing installed besides torch."""
NO_MPS = Found(accelerator=TorchAccelerator("mps"), num_devices=0, why_unavailable="No mps here.")


def needs_a_backend() -> DDPStrategy:
    raise ImportError("`pip install 'torchfabric[faraway]'` adds what this strategy needs.")


def test_each_accelerator_is_available_or_has_a_reason() -> None:
    found = report(Machine(found=(CPU, CUDA, NO_MPS)), {})
    assert found["accelerators"] == [
        {"name": "cpu", "devices": 1, "why_not": None},
        {"name": "cuda", "devices": 2, "why_not": None},
        {"name": "mps", "devices": 0, "why_not": "No mps here."},
    ]


def test_each_strategy_is_reported_to_run_on_the_accelerators_that_are_usable() -> None:
    rows = report(Machine(found=(CPU, CUDA, NO_MPS)), OF_TORCH)["strategies"]
    assert [row["name"] for row in rows] == list(OF_TORCH)
    assert {tuple(row["runs_on"]) for row in rows} == {("cuda", "cpu")}


def test_a_strategy_that_cannot_be_constructed_is_reported_with_its_error() -> None:
    faraway = Registration(name="faraway", make=needs_a_backend, description="far away")
    (row,) = report(Machine(found=(CPU,)), {"faraway": faraway})["strategies"]
    assert row["runs_on"] == []
    assert row["why_not"] == "`pip install 'torchfabric[faraway]'` adds what this strategy needs."


def test_a_launcher_that_cannot_work_here_is_reported_with_the_reason() -> None:
    notebook = Program(flags=(), kind="notebook", target="", arguments=())
    rows = {row["name"]: row["why_not"] for row in report(Machine(program=notebook), {})["launchers"]}
    assert rows["spawn"] is None
    assert "this is a notebook and has no file. Write `launcher='fork'`" in rows["script"]


def test_the_detected_world_is_reported_and_does_not_refuse_strategies() -> None:
    machine = Machine(world=World(launcher="slurm"), variables=("SLURM_NTASKS=1",))
    found = report(machine, OF_TORCH)
    assert found["started_by"] == {"launcher": "slurm", "rank": 0, "size": 1}
    assert found["variables"] == ["SLURM_NTASKS=1"]
    assert all(row["runs_on"] == ["cpu"] for row in found["strategies"])


@functools.cache  # it takes seconds, and says the same each time
def doctor(*arguments: str) -> str:
    command = [sys.executable, "-m", "fabric", "doctor", *arguments]
    return template.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.mark.slow
def test_doctor_prints_json() -> None:
    found = json.loads(doctor("--json"))
    assert found["torch"] == torch.__version__
    assert {row["name"] for row in found["accelerators"]} >= {"cpu", "cuda", "mps", "xpu", "hpu", "npu"}
    assert [row["name"] for row in found["strategies"]] == list(available_strategies())


@pytest.mark.slow
def test_doctor_prints_tables_of_the_same_report() -> None:
    shown = doctor()
    for word in ("Python", torch.__version__, "accelerator", "launcher", "strategy", "single_device", "forkserver"):
        assert word in shown
    assert "\x1b" not in shown
    numbered = [line.partition(") ")[2] for line in shown.splitlines() if line.startswith("(")]
    assert any(sentence.startswith("`strategy='manual'` parallelises the model") for sentence in numbered)


def on_terminal(width: int, *arguments: str) -> list[str]:
    """The lines that doctor prints on a terminal of this width."""
    master, slave = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(width), "TERM": "dumb", template.FORKS: "yes"}
    process = template.Popen([sys.executable, "-m", "fabric", "doctor", *arguments], stdout=slave, env=environ)
    os.close(slave)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while chunk := os.read(master, 4096):
            seen += chunk
    os.close(master)
    assert process.wait(100) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_sentences_are_wrapped_at_words(width: int) -> None:
    lines = on_terminal(width)
    assert max(map(len, lines)) <= width
    text = " ".join(line.strip() for line in lines)
    found = json.loads(doctor("--json"))
    for row in [*found["accelerators"], *found["strategies"]]:
        assert row["why_not"] is None or row["why_not"] in text
    assert max(map(len, on_terminal(width, "--strategies"))) <= width


@pytest.mark.slow
def test_strategies_that_need_a_function_of_the_user_say_so() -> None:
    shown = {line.split("│")[1].strip(): line for line in on_terminal(120) if line.startswith("│ m")}
    for name in ("manual", "model_parallel"):
        assert "needs your function" in shown[name]
    found = json.loads(doctor("--strategies", "--json"))["strategies"]
    assert {row["name"] for row in found if row["needs_function"]} == {"manual", "model_parallel"}


@pytest.mark.slow
def test_another_distribution_of_the_import_package_is_named(tmp_path: Path) -> None:
    for name, package in (("fabric", "fabric"), ("invoke", "invoke")):
        folder = tmp_path / f"{name}-3.2.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.2.2\n")
        (folder / "top_level.txt").write_text(f"{package}\n")
    command = [sys.executable, "-m", "fabric", "doctor"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = template.run(command, capture_output=True, text=True, timeout=100, env=environ)
    assert "The distribution `fabric` owns the import package `fabric`, too: its files and those of" in done.stdout
    assert "Run `pip uninstall fabric`, and install torchfabric again." in done.stdout
    assert "owns the import package" not in doctor()


def declares() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=False)


def test_doctor_reports_the_capabilities_a_strategy_lacks_and_its_precisions() -> None:
    from fabric.strategies import FairScaleFSDPStrategy

    made = {
        "plain": Registration(name="plain", make=declares, description=""),
        "sliced": Registration(name="sliced", make=FairScaleFSDPStrategy, description=""),
    }
    plain, sliced = report(Machine(found=(CPU,)), made)["strategies"]
    assert plain["lacks"] == dict(declares().lacks)
    assert "find_unused_parameters=True" in plain["lacks"]["unused"]
    assert plain["precisions"] == {"cpu": ["64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]}
    assert sliced["precisions"] == {"cpu": ["32-true", "16-true", "16-mixed", "bf16-mixed"]}


@pytest.mark.slow
def test_doctor_strategies_prints_a_table_and_the_reasons() -> None:
    shown = doctor("--strategies")
    assert "ddp_find_unused_parameters_true" in shown
    assert "later_optimizers" in shown
    assert "(1) " in shown
    assert "accumulate: several backwards before a step" in shown
    assert "launcher" not in shown.split("(1) ")[0]
    rows = json.loads(doctor("--strategies", "--json"))["strategies"]
    assert {row["name"] for row in rows} == set(available_strategies())
    assert next(row for row in rows if row["name"] == "ddp")["lacks"].keys() == {"unused"}
