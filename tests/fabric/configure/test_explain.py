"""Where each setting of a run comes from, and the table that says so."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import template

from fabric.configure.explain import explain
from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.configure.resolve import resolve
from fabric.configure.run_options import ProgramId, as_variable
from fabric.launchers.environments.torchelastic import variables_of
from fabric.launchers.world import Rendezvous, World
from fabric.strategies import DDPStrategy, Precision

BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
PLACE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
AGENT = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
TORCHRUN = {**PLACE, **AGENT, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}


def settings(environ: Mapping[str, str] | None = None, **arguments: Any) -> dict[str, tuple[str, str]]:
    """Value and source of each setting, by name."""
    request = Request.build(arguments, environ or {})
    machine = Machine.look(environ or {}, request)
    rows = explain(request, machine, resolve(request, machine), environ or {})
    return {name: (value, source) for name, value, source in rows}


def test_defaults_and_what_auto_has_chosen_are_told_apart() -> None:
    found = settings(accelerator="cpu")
    assert found["accelerator"] == ("cpu", "argument")
    assert found["strategy"] == ("SingleDeviceStrategy", "default (auto)")
    assert found["devices"] == ("0", "default (auto)")
    assert found["precision"] == ("32-true", "default")
    assert found["world_size"] == ("1", "devices, num_nodes and strategy")


def test_an_argument_is_named_as_one_and_so_are_the_options_of_a_strategy() -> None:
    strategy = DDPStrategy(bucket_bytes=1000)
    found = settings(accelerator="cpu", devices=2, strategy=strategy, timeout_seconds=9, plugins=[Precision.parse(16)])
    assert found["devices"] == ("0, 1", "argument")
    assert found["strategy.bucket_bytes"] == ("1000", "argument")
    assert found["strategy.static_graph"] == ("False", "default")
    assert found["timeout_seconds"] == ("9.0", "argument")
    assert found["precision"] == ("16-mixed", "argument")


def test_the_options_of_a_name_are_arguments_where_they_differ_from_the_class() -> None:
    found = settings(accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true")
    assert found["strategy.find_unused_parameters"] == ("True", "argument")


def test_the_command_line_is_named_also_for_a_value_that_is_the_default() -> None:
    typed = as_variable({"devices": "2", "sanitize": "start", "accelerator": "auto"}, ProgramId.current())
    found = settings(typed, strategy="ddp")
    assert found["devices"] == ("0, 1", "command line")
    assert found["sanitize"] == ("start", "command line")
    assert found["strategy"] == ("DDPStrategy", "argument")
    assert found["accelerator"][1] == "default (auto)"


def test_a_launcher_is_named_with_its_variables() -> None:
    found = settings(TORCHRUN, accelerator="cpu")
    assert found["world_size"][0] == "2"
    assert found["world_size"][1].startswith("launcher (torchelastic): RANK=1 WORLD_SIZE=2")
    assert found["devices"] == ("0, 1", "launcher (torchelastic)")
    assert found["main_address"] == ("10.0.0.1", "launcher (torchelastic)")
    assert found["strategy"] == ("DDPStrategy", "default (auto)")


def test_variables_set_by_hand_and_those_of_libraries_are_environment_variables() -> None:
    found = settings({**BY_HAND, "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "HOME": "/root"}, accelerator="cpu")
    assert found["devices"] == ("0", "environment variables")
    assert found["OMP_NUM_THREADS"] == ("3", "environment variable")
    assert found["NCCL_DEBUG"] == ("INFO", "environment variable")
    assert "HOME" not in found


def test_a_rank_of_our_own_launcher_says_what_the_program_was_given() -> None:
    at = Rendezvous(address="127.0.0.1", port=4000, hosted=True)
    world = World(rank=1, size=2, local_rank=1, local_size=2, rendezvous=at, launcher="script")
    found = settings(variables_of(world, {}, 2), accelerator="cpu", devices=2)
    assert found["devices"] == ("0, 1", "argument")
    assert found["launcher"] == ("script", "launcher (script)")


def fabric(*arguments: str, at: Path) -> Any:
    return template.run(
        [sys.executable, "-m", "fabric", *arguments], cwd=at, capture_output=True, text=True, timeout=100
    )


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]


SCRIPT = """
import sys
from fabric import Fabric
print("before", sys.argv[1:], flush=True)
Fabric(accelerator="cpu", strategy="ddp", devices="auto").launch()
print("after")
"""


@pytest.mark.slow
def test_the_command_shows_the_settings_of_a_script_and_starts_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shown = fabric("explain", "--devices", "2", "train.py", "--lr", "3", at=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    first, _, table = shown.stdout.partition("\n")
    assert first == "before ['--lr', '3']"
    assert not table.endswith("after\n")
    rows = rows_of(table)
    assert ["devices", "0, 1", "command line"] in rows
    assert ["strategy", "DDPStrategy", "argument"] in rows
    assert ["sanitize", "start", "default"] in rows


@pytest.mark.slow
def test_the_command_without_a_script_explains_a_fabric_without_arguments(tmp_path: Path) -> None:
    shown = fabric("explain", "--accelerator", "cpu", "--devices", "2", at=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    rows = rows_of(shown.stdout)
    assert ["world_size", "2"] in [row[:2] for row in rows]
    assert ["accelerator", "cpu", "command line"] in rows


@pytest.mark.slow
def test_a_wrong_option_and_a_missing_script_are_one_sentence(tmp_path: Path) -> None:
    wrong = fabric("explain", "--devices", "two", at=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("fabric explain: `--devices two` names no devices.")
    missing = fabric("explain", "nothing.py", at=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == (
        "fabric explain: `nothing.py` is not a file. Write the path of a script, or `-m` and the name of a module.\n"
    )
