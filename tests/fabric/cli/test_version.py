"""The version, for programs and for people."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fabric
from fabric.cli import main

OURS, TORCH = metadata.version("torchfabric"), metadata.version("torch")


def test_the_version_is_that_of_the_distribution() -> None:
    assert fabric.__version__ == OURS


def test_the_command_line_shows_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"torchfabric {OURS}, torch {TORCH}, Python 3.")


def test_both_commands_show_the_version_and_it_imports_no_torch() -> None:
    words = "import fabric, sys; print(fabric.__version__, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stdout == f"{OURS} False\n"
    for command in ("fabric", "torchfabric"):
        done = subprocess.run([Path(sys.executable).with_name(command), "--version"], capture_output=True, text=True)
        assert done.stdout.startswith(f"torchfabric {OURS}, torch "), done.stderr
