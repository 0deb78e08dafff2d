"""What a type checker says of a user's program, `program.py`: it infers the user's classes, and finds each mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "program.py"
MARKED = {number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# error")}


def output_of(*command: str, cwd: Path) -> str:
    """What a checker printed; it is run where no settings of this repository are found."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110).stdout


def test_mypy_reports_the_marked_lines_and_no_others(tmp_path: Path) -> None:
    output = output_of(sys.executable, "-m", "mypy", "--strict", str(PROGRAM), cwd=tmp_path)
    found = {int(line) for line in re.findall(r"program\.py:(\d+): error", output)}
    assert MARKED
    assert found == MARKED, output


def test_pyright_reports_the_marked_lines_and_no_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(PROGRAM)]
    output = output_of(*command, cwd=tmp_path)
    messages = json.loads(output[output.index("{") :])["generalDiagnostics"]
    found = {message["range"]["start"]["line"] + 1 for message in messages if message["severity"] == "error"}
    assert found == MARKED, output
