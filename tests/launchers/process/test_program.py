"""A command line of Python, taken apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fabric.launchers.process.program import Program, parse


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python train.py --lr 1", Program(flags=(), kind="script", target="train.py", arguments=("--lr", "1"))),
        (
            "python -u -X dev train.py -c",
            Program(flags=("-u", "-X", "dev"), kind="script", target="train.py", arguments=("-c",)),
        ),
        (
            "python -OO -Wignore train.py",
            Program(flags=("-OO", "-W", "ignore"), kind="script", target="train.py", arguments=()),
        ),
        ("python -m package.train x", Program(flags=(), kind="module", target="package.train", arguments=("x",))),
        ("python -um package", Program(flags=("-u",), kind="module", target="package", arguments=())),
        ("python -mpackage", Program(flags=(), kind="module", target="package", arguments=())),
        ("python -Bc pass -m", Program(flags=("-B",), kind="command", target="pass", arguments=("-m",))),
        ("python - x", Program(flags=(), kind="stdin", target="-", arguments=("x",))),
        ("python", Program(flags=(), kind="stdin", target="-", arguments=())),
        (
            "python --check-hash-based-pycs never train.py",
            Program(flags=("--check-hash-based-pycs", "never"), kind="script", target="train.py", arguments=()),
        ),
    ],
)
def test_flags_target_and_arguments_are_parsed(line: str, program: Program) -> None:
    assert parse(line.split()) == program


def test_ranks_of_a_folder_that_python_runs_get_what_its_main_defines(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "beside.py").write_text("FACTOR = 3\n")
    (folder / "__main__.py").write_text(
        "from beside import FACTOR\nfrom fabric import Fabric\n\n\n"
        "def work(fabric):\n    return FACTOR * fabric.world_size\n\n\n"
        "if __name__ == '__main__':\n"
        "    print(Fabric(accelerator='cpu', devices=2, launcher='forkserver').launch(work))\n"
    )
    done = subprocess.run([sys.executable, str(folder)], capture_output=True, text=True, timeout=100)
    assert done.stdout == "6\n", done.stderr
