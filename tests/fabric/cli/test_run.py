"""`fabric run`, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import template

TELL = """
import json, os, subprocess, sys
from fabric.configure.run_options import options_in

def tell(depth=0):
    print(json.dumps([options_in(os.environ), sys.argv[1:]]), flush=True)

if __name__ == "__main__":
    tell()
"""
TELL_FROM_A_CHILD = (
    TELL
    + """
    import multiprocessing
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=tell)
        process.start()
        process.join()
"""
)
START_OTHERS = (
    TELL
    + """
    subprocess.run([sys.executable, "other.py"], check=True)
    subprocess.run([sys.executable, *sys.orig_argv[1:]], check=True, env={**os.environ, "AGAIN": "1"}) \\
        if "AGAIN" not in os.environ else None
"""
)
RANKS = """
from fabric import Fabric
fabric = Fabric()
fabric.launch()
print(f"rank {fabric.global_rank} of {fabric.world_size}\\n", end="", flush=True)
"""


def fabric(
    *arguments: str, at: Path, command: tuple[str, ...] = ("-m", "fabric"), fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    return template.run(
        [sys.executable, *command, *arguments],
        cwd=at,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        fresh=fresh,
    )


def options_of(done: subprocess.CompletedProcess[str]) -> list[list[object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def tell(tmp_path: Path) -> Path:
    (tmp_path / "tell.py").write_text(TELL)
    return tmp_path


def test_a_script_gets_the_options_and_its_own_arguments(tell: Path) -> None:
    done = fabric("run", "--devices", "2", "--strategy", "ddp", "tell.py", "--devices", "9", "-m", "x", at=tell)
    assert options_of(done) == [[{"strategy": "ddp", "devices": "2"}, ["--devices", "9", "-m", "x"]]]


def test_a_module_gets_the_options(tell: Path) -> None:
    done = fabric("run", "--precision", "bf16", "-m", "tell", "a", at=tell)
    assert options_of(done) == [[{"precision": "bf16"}, ["a"]]]


def test_a_package_gets_the_options(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(TELL)
    assert options_of(fabric("run", "--devices=-1", "-m", "package", at=tmp_path)) == [[{"devices": "-1"}, []]]
    assert options_of(fabric("run", "--devices=-1", "package", at=tmp_path)) == [[{"devices": "-1"}, []]]


def test_the_ranks_of_a_script_get_the_options(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL_FROM_A_CHILD)
    assert options_of(fabric("run", "--devices", "3", "tell.py", at=tmp_path)) == [[{"devices": "3"}, []]] * 4


def test_other_scripts_do_not_get_the_options(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(START_OTHERS)
    (tmp_path / "other.py").write_text(TELL)
    printed = [words for words, _ in options_of(fabric("run", "--devices", "3", "tell.py", at=tmp_path))]
    assert printed == [{"devices": "3"}, {}, {"devices": "3"}, {}]


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("raise SystemExit(7)")
    assert fabric("run", "leave.py", at=tmp_path).returncode == 7


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--devices", "two"), "`--devices two` names no devices. Write"),
        (("--devices", "0,0"), "`--devices 0,0` names no devices. Write"),
        (("--num-nodes", "0"), "`--num-nodes 0` is out of range. Write a whole number from 1."),
        (("--node-rank", "-1"), "`--node-rank -1` is out of range. Write a whole number from 0."),
        (("--main-port", "http"), "`--main-port http` is out of range. Write a whole number from 1."),
        (("--main-address", ""), "`--main-address ` is not a name. Write one, or leave it out."),
        (
            ("--timeout-seconds", "soon"),
            "`--timeout-seconds soon` is not a duration. Write a number of seconds above 0.",
        ),
        (("--max-restarts", "-1"), "`--max-restarts -1` is out of range. Write a whole number from 0."),
        (("--launcher", "mpi"), "`--launcher mpi` is not known. Write one of 'auto', 'script', "),
    ],
)
def test_a_wrong_option_prints_one_line_and_starts_nothing(tell: Path, words: tuple[str, ...], sentence: str) -> None:
    done = fabric("run", *words, "tell.py", at=tell)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"fabric run: {sentence}")
    assert done.stderr.count("\n") == 1


def test_a_missing_script_prints_one_line(tmp_path: Path) -> None:
    done = fabric("run", "train.py", at=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "fabric run: `train.py` is not a file. Write the path of a script, or `-m` and the name of a module.\n"
    )


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("run", "--devices", "x", "y"), ()])
def test_the_command_line_imports_no_torch(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys, fabric.cli\ntry: fabric.cli.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'rich')], file=sys.stderr)"
    )
    done = fabric(*arguments, at=tmp_path, command=("-c", code), fresh=True)
    assert done.stderr.endswith("[]\n")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["auto", "script", "fork"])
def test_the_script_runs_in_the_requested_number_of_processes(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = fabric("run", "--accelerator", "cpu", "--devices", "2", "--launcher", launcher, "ranks.py", at=tmp_path)
    assert sorted(line for line in done.stdout.splitlines() if line) == ["rank 0 of 2", "rank 1 of 2"], done.stderr


@pytest.mark.slow
@pytest.mark.thorough
def test_after_a_failure_all_ranks_restart_up_to_max_restarts_times(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(f"{RANKS}\nif fabric.global_rank == 1:\n    raise ValueError('boom')\n")
    words = ("--accelerator", "cpu", "--devices", "2", "--max-restarts", "1")
    done = fabric("run", *words, "ranks.py", at=tmp_path)
    assert (done.returncode, done.stdout.count("rank 1 of 2")) == (1, 2)
    assert done.stderr.count("All ranks start again: restart 1 of 1.") == 1
    assert done.stderr.strip().endswith("ValueError: boom")


@pytest.mark.slow
@pytest.mark.thorough
def test_devices_that_differ_from_torchruns_processes_raise_in_the_constructor(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(
        "from fabric import Fabric\nFabric(accelerator='cpu', devices=1)\nprint('made')\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = fabric("alone.py", at=tmp_path, command=torchrun)
    assert done.returncode != 0
    assert "made" not in done.stdout
    assert (
        "ask for 1 process on this node, but torchelastic started 2 processes (2 on this node; read: RANK="
        in done.stderr
    )
