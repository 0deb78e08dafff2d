"""Programs of tests are forks of the template, but for those that need an interpreter of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import template

PARENT = "import os; print(os.getppid())"


def parent(arguments: list[str], **options: object) -> int:
    done = template.run([sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=60, **options)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every program is a fresh interpreter")
@pytest.mark.parametrize("import_path", [None, "", "elsewhere"])
def test_a_program_is_forked_from_the_template(
    import_path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if import_path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", import_path)
    (tmp_path / "program.py").write_text(PARENT)
    for arguments in (["-c", PARENT], [str(tmp_path / "program.py")]):
        assert parent(arguments, stdin=subprocess.DEVNULL) != os.getpid()


def test_a_fresh_interpreter_or_one_with_another_fabric_is_not(tmp_path: Path) -> None:
    (tmp_path / "fabric").mkdir()
    assert parent(["-c", PARENT], stdin=subprocess.DEVNULL, fresh=True) == os.getpid()
    assert parent(["-I", "-c", PARENT], stdin=subprocess.DEVNULL) == os.getpid()
    assert (
        parent(["-c", PARENT], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(tmp_path)}) == os.getpid()
    )
