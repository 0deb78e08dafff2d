"""What a person gets who installs the package: one import package of three folders, typed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the tree as `python -m build` does."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked_roots():
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (file,) = built.glob("torchfabric-*-py3-none-any.whl")
    return zipfile.ZipFile(file)


def tracked_roots() -> list[str]:
    return ["pyproject.toml", "README.md", "LICENSE", "fabric", "strategies", "launchers", "tests", "examples"]


def copy(source: Path, target: Path) -> None:
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    for file in files:
        if "__pycache__" not in file.parts:
            there = target / file.relative_to(source) if file != source else target
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(file.read_bytes())


def modules_in_the_tree() -> set[str]:
    """Where each module must lie in the wheel."""
    inside = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fabric").rglob("*.py")}
    for layer in ("strategies", "launchers"):
        inside |= {f"fabric/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / layer).rglob("*.py")}
    return inside


def test_the_wheel_holds_every_module_of_the_three_folders_and_no_other(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {*modules_in_the_tree(), "fabric/py.typed", "fabric/report/page.html"}


def test_the_sdist_can_make_the_same_wheel(built: Path) -> None:
    (file,) = built.glob("torchfabric-*.tar.gz")
    with tarfile.open(file) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "fabric/py.typed"} <= inside
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "launchers").rglob("*.py")} <= inside


def test_the_metadata_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert (metadata["Name"], metadata["License-Expression"]) == ("torchfabric", "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert needed == ["torch>=2.9", "rich>=14.1", "cloudpickle>=3.1", "xxhash>=3.5"]
    extras = {
        "bench",
        "deepspeed",
        "dev",
        "examples",
        "fairscale",
        "horovod",
        "loggers",
        "report",
        "safetensors",
        "test",
        "test-stores",
        "xla",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == extras


PROGRAM = """
import importlib, sys
import fabric, fabric.strategies, fabric.launchers
assert fabric.__file__.startswith(sys.argv[1]), fabric.__file__
assert fabric.strategies.__file__ == f"{sys.argv[1]}/fabric/strategies/__init__.py", fabric.strategies.__file__
for name in ("strategies", "launchers"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name
    else:
        raise AssertionError(f"`import {name}` works, which is a user's name")
with fabric.Fabric(accelerator="cpu", devices=1) as one:
    print(one.world_size, fabric.strategies.available_strategies())
"""


@pytest.mark.thorough
def test_an_installed_copy_works_elsewhere_and_takes_no_names_of_users(built: Path, tmp_path: Path) -> None:
    (file,) = built.glob("*.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(file)], check=True, timeout=100)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-c", PROGRAM, str(target)]
    ended = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "'ddp'" in ended.stdout
