"""A cluster environment, a launcher and a strategy are each added by one file and one row of a table.

The package is copied, the files and rows are added to the copy, and programs run over it: everything that a user can
say, and everything that is said to the user, follows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import template

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]

LAYERS = ("strategies", "launchers")
FILES = {
    "launchers/environments/beehive.py": '''
"""Ranks of `buzz`."""

from fabric.launchers.environments.environment import Environment
from fabric.launchers.world import World


class BeehiveEnvironment(Environment):
    name = "beehive"
    looked_for = "BEE_RANK (buzz)"
    names = ("BEE_RANK", "BEES")

    def detect(self, environ):
        return "BEE_RANK" in environ

    def world(self, environ):
        return World(launcher="beehive")
''',
    "launchers/tandem.py": '''
"""Ranks of the fork server, under another name."""

from fabric.launchers.start_methods import forkserver


def tandem(topology):
    return forkserver(topology)
''',
    "strategies/solo.py": '''
"""One device, under another name."""

from fabric.strategies.ddp.strategy import DDPStrategy


def solo():
    return DDPStrategy(bucket_bytes=1024)
''',
}
ROWS = {
    "launchers/environments/__init__.py": (
        "    SlurmEnvironment(),\n",
        '    __import__("fabric.launchers.environments.beehive", fromlist=["x"]).BeehiveEnvironment(),\n',
    ),
    "launchers/launcher_registry.py": (
        "_TABLE = (\n",
        '    LauncherRow(name="tandem", path="tandem:tandem", description="two by two", needs_function=True),\n',
    ),
    "strategies/strategy_registry.py": (
        "TABLE: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {\n",
        '    "solo": ("solo:solo", "all alone", {}),\n',
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it is installed, and the new files and rows in it."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "fabric"
    for source, target in ((ROOT / "fabric", package), *((ROOT / one, package / one) for one in LAYERS)):
        shutil.copytree(source, target, dirs_exist_ok=True)  # with the bytecode, which takes seconds to compile
    for name, text in FILES.items():
        (folder / "fabric" / name).write_text(text.lstrip())
    for name, (before, row) in ROWS.items():
        path = folder / "fabric" / name
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, before + row))
    return folder


def run(copy: Path, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(copy), **environ}
    command = [sys.executable, *map(str, arguments)]
    return template.run(command, cwd=copy, env=environ, capture_output=True, text=True, timeout=110)


@pytest.mark.thorough
def test_fabric_doctor_shows_a_new_row_of_each_table(copy: Path) -> None:
    done = run(copy, "-m", "fabric", "doctor", "--json", BEE_RANK="0")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    rows = {table: {row["name"]: row for row in found[table]} for table in ("launchers", "strategies")}
    assert rows["launchers"]["tandem"] == {"name": "tandem", "description": "two by two", "why_not": None}
    assert rows["strategies"]["solo"]["runs_on"] == ["cpu"]
    assert found["started_by"]["launcher"] == "beehive"
    assert found["variables"] == ["BEE_RANK=0"]


PROGRAM = """
import os
from fabric import Fabric
from fabric.strategies import DDPStrategy


def main(fabric, number):
    return fabric.world_size * number, fabric.strategy.bucket_bytes


if __name__ == "__main__":
    for launcher in ("tandem", "auto"):
        print(Fabric(accelerator="cpu", devices=2, strategy="solo", launcher=launcher).launch(main, 21))
    print(Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(launcher="tandem")).launch(main, 4))
    for words in ({"launcher": "external"}, {"launcher": "frok"}, {"strategy": "sollo"}, {}):
        if not words:
            os.environ["BEE_RANK"] = "0"
        try:
            Fabric(accelerator="cpu", devices=2, **words)
        except ValueError as error:
            print(error)
"""


def test_a_program_uses_the_new_launcher_and_strategy_and_errors_name_them(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(copy, tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    *results, no_world, no_launcher, no_strategy, no_second_rank = done.stdout.splitlines()
    assert results == ["(42, 1024)", "(42, 1024)", f"(8, {25 * 2**20})"]
    assert "BEE_RANK (buzz)" in no_world
    assert "'tandem'" in no_launcher
    assert "Did you mean 'solo'?" in no_strategy
    assert "beehive started 1 process (1 on this node; read: BEE_RANK=0)" in no_second_rank
