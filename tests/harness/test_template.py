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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every program is a fresh interpreter")
def test_with_forks_a_program_of_a_program_is_forked_and_one_that_replaces_it_has_its_process(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import os, sys; print(os.getpid(), os.getppid(), sys.argv[1], os.environ['A'])")
    start = "import os, subprocess, sys; print(os.getpid(), os.getppid(), flush=True); "
    words, environ = "[sys.executable, 'child.py', 'word']", "{**os.environ, 'A': 'a', 'PYTHONHASHSEED': '0'}"
    for call, is_replaced in (
        (f"subprocess.run({words}, env={environ})", False),
        (f"os.execve(sys.executable, {words}, {environ})", True),
    ):
        done = template.run(
            [sys.executable, "-c", start + call],
            env={**os.environ, template.FORKS: "yes"},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        own, child = (line.split() for line in done.stdout.splitlines())
        assert (own[0] == child[0], own[1]) == (is_replaced, child[1]), "both are children of the template"
        assert child[2:] == ["word", "a"]
