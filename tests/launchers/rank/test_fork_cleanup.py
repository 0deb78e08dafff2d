"""Launching by fork: what was open before belongs to the process that was started, and happens once."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from processes import run
from worlds import run_world

from fabric.launchers.private_names import require
from fabric.launchers.world import World

PROGRAM = """
import atexit, ctypes, gc, logging, logging.handlers, multiprocessing, os, signal, sys, tempfile
from fabric import Fabric

folder, way, end = sys.argv[1:]
written = os.open(f"{folder}/written", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def tell(words):
    os.write(written, f"{words}\\n".encode())

atexit.register(tell, "exit function")
text = open(f"{folder}/text", "w")
text.write("written before\\n")
binary = open(f"{folder}/binary", "wb")
binary.write(b"written before\\n")
memory = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"{folder}/log"))
logging.getLogger().addHandler(memory)
logging.warning("logged before")
ctypes.CDLL(None).printf(b"printed before in C\\n")
directory, named = tempfile.TemporaryDirectory(dir=folder), tempfile.NamedTemporaryFile(dir=folder)
manager = multiprocessing.Manager()
shared = manager.dict(before=0)
tell(len(shared))
fabric = Fabric(accelerator="cpu", devices=2, launcher="fork")

def work(fabric):
    global mine, directory
    if fabric.global_rank == 0:
        with named:
            pass
        del directory
        gc.collect()
    fabric.barrier()
    tell(f"rank finds {len(os.listdir(folder))} entries")
    shared[fabric.global_rank] = fabric.global_rank
    logging.warning("logged by a rank")
    atexit.register(tell, "exit function of a rank")
    mine = open(f"{folder}/mine", "a")  # left open
    mine.write("of a rank\\n")
    text.write("written by a rank\\n")
    fabric.barrier()
    if end == "raise":
        raise ValueError("a fish")
    if end == "interrupt" and fabric.global_rank == 0:
        os.kill(supervisor, signal.SIGINT)
        signal.pause()

supervisor = os.getpid()
with tempfile.TemporaryDirectory(dir=folder):
    if way == "function":
        fabric.launch(work)
    else:
        fabric.launch()
        work(fabric)
tell(sorted(shared.keys(), key=str))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "end", "code"), [("line", "", 0), ("function", "", 0), ("line", "raise", 1), ("line", "interrupt", -2)]
)
def test_what_was_open_before_a_fork_is_written_run_and_deleted_once(
    tmp_path: Path, way: str, end: str, code: int
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = tmp_path / "folder"
    folder.mkdir()
    done = run([tmp_path / "program.py", folder, way, end])
    assert done.returncode == code, done.stderr
    written = (folder / "written").read_text().splitlines()
    assert written.count("exit function") == 1, written
    assert written.index("exit function") > max(number for number, words in enumerate(written) if "rank" in words), (
        written
    )
    # written, text, binary, log, the named file and two folders; the rank that came second may find `mine`.
    assert set(written) & {f"rank finds {number} entries" for number in range(5)} == set(), written
    assert done.stdout.count("printed before in C") == 1
    left = sorted(path.name for path in folder.iterdir())
    assert (folder / "text").read_text().count("written before") == 1
    assert (folder / "binary").read_text() == "written before\n"
    assert (folder / "log").read_text().count("logged before") == 1
    assert left == ["binary", "log", "mine", "text", "written"]
    if end != "interrupt":  # a signal ends ranks before their files are written, as it ends a program of one process
        assert written.count("exit function of a rank") == 2
        assert (folder / "mine").read_text() == "of a rank\n" * 2
        assert (folder / "text").read_text().count("written by a rank") == 2
        assert (folder / "log").read_text().count("logged by a rank") == 2
    if way == "function":
        assert written[-2:] == ["[0, 1, 'before']", "exit function"]


def write_without_closing(world: World, folder: str) -> None:
    file = open(f"{folder}/{world.rank}", "w")  # noqa: SIM115  left open
    vars(sys)["left_open"] = file, tempfile.TemporaryDirectory(dir=folder)
    file.write("written")


@pytest.mark.slow
def test_what_a_rank_of_the_fork_server_leaves_open_is_written_and_deleted(tmp_path: Path) -> None:
    run_world(2, write_without_closing, str(tmp_path))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "written", "1": "written"}


def test_a_python_without_a_private_name_that_is_needed_raises() -> None:
    with pytest.raises(ImportError, match=r"Python 3\.\d+\.\d+ has no `atexit\._never_was`, a private name that"):
        require("Python", "3.10 to 3.13", {"atexit": {"_never_was": "to be missed"}})
