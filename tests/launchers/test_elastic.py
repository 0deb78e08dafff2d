"""`launcher='elastic'`: all ranks start again after a failure, as real programs."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from processes import all_gone, run, running

PROGRAM = '''
import json, os, sys
from fabric.launchers import Topology, detect_world, join
from fabric.launchers.choose import choose_launcher

def function(world, failures):
    """All ranks meet and read what each has written in this attempt; in the first attempts the last one fails."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store = join(world, 60, print)
    store.set(str(world.rank), str(attempt))
    found = [store.get(str(rank)).decode() for rank in range(world.size)]
    if attempt < failures and world.rank == world.size - 1:
        raise ValueError(f"boom {attempt}")
    if attempt < failures:
        store.get("never")
    return {"attempt": attempt, "found": found, "told": world.rendezvous and world.rendezvous.attempt}

def main(case, size, failures, max_restarts):
    chosen = choose_launcher(
        "auto" if detect_world(os.environ) else "elastic",
        Topology(num_processes=size), function=function if case == "launch" else None,
        world=detect_world(os.environ), max_restarts=max_restarts,
    )
    if case == "launch":
        result = chosen.launch(function, failures)
    elif case == "enter":
        result = function(chosen.enter(), failures)
    else:
        chosen.enter()
        sys.stdout.write("ready\\n")
        sys.stdout.flush()
        import signal
        signal.pause()
    sys.stdout.write(json.dumps(result) + "\\n")

if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
'''
pytestmark = pytest.mark.slow


def start(folder: Path, case: str, *, size: int, failures: int, max_restarts: int) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return run([folder / "program.py", case, str(size), str(failures), str(max_restarts)])


def test_a_function_is_restarted_on_all_ranks_and_each_failure_is_reported(tmp_path: Path) -> None:
    done = start(tmp_path, "launch", size=2, failures=2, max_restarts=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"attempt": 2, "found": ["2", "2"], "told": 2}
    messages = ["ValueError: boom 0", "restart 1 of 2.", "ValueError: boom 1", "restart 2 of 2."]
    assert sorted(messages, key=done.stderr.rindex) == messages


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2])
def test_a_script_is_restarted_on_all_ranks(tmp_path: Path, size: int) -> None:
    done = start(tmp_path, "enter", size=size, failures=1, max_restarts=3)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results == [{"attempt": 1, "found": ["1"] * size, "told": 1 if size > 1 else None}] * size
    assert "All ranks start again: restart 1 of 3." in done.stderr


@pytest.mark.thorough
def test_after_the_last_restart_the_program_fails(tmp_path: Path) -> None:
    done = start(tmp_path, "enter", size=2, failures=9, max_restarts=1)
    assert done.returncode == 1
    assert done.stderr.count("All ranks start again") == 1
    assert done.stderr.strip().endswith("ValueError: boom 1")


def test_a_program_that_gets_sigterm_is_not_restarted(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with running([tmp_path / "program.py", "wait", "2", "0", "3"]) as program:
        program.wait_for("ready", times=2)
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(timeout=20) == -signal.SIGTERM
        assert not all_gone(program)
        assert program.process.stderr is not None
        assert "start again" not in program.process.stderr.read()
