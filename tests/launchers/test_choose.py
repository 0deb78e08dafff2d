"""Every launcher word, in the situations in which a person writes it: it works, or the message says which one does."""

from __future__ import annotations

import subprocess
import threading
import unittest
from pathlib import Path

import pytest
import template
from processes import run

from fabric.launchers import Rendezvous, Topology, World
from fabric.launchers.choose import choose_launcher
from fabric.launchers.launcher import External

HARNESS = str(Path(template.__file__).parent)
TWO = Topology(num_processes=2)
WORLD = World(
    rank=1,
    size=2,
    local_rank=1,
    local_size=2,
    launcher="torchelastic",
    rendezvous=Rendezvous(address="127.0.0.1", port=1, hosted=True),
)


def function(world: World) -> int:
    return world.rank


def test_an_existing_world_is_used() -> None:
    launcher = choose_launcher("auto", TWO, function=None, world=WORLD)
    assert isinstance(launcher, External)
    assert launcher.enter() is WORLD


def test_nodes_may_have_different_numbers_of_ranks() -> None:
    place = Rendezvous(address="n1", port=1, hosted=False)
    world = World(rank=2, size=3, local_size=1, node_rank=1, num_nodes=2, rendezvous=place, launcher="slurm")
    topology = Topology(num_processes=1, num_nodes=2, node_rank=1, main_port=1)
    assert choose_launcher("auto", topology, function=None, world=world).enter() == world


def test_one_process_is_this_process() -> None:
    launcher = choose_launcher("auto", Topology(num_processes=1), function=None, world=None)
    assert isinstance(launcher, External)
    assert launcher.enter() == World()
    assert launcher.launch(function) == 0


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("frok", "`launcher='frok'` names no launcher. Write one of 'script', 'fork'"),
        ("forkserver", "`launch()` got none. Write `fabric.launch(main)`"),
        ("spawn", "`launch()` got none. Write `fabric.launch(main)`"),
    ],
)
def test_an_argument_that_has_no_effect_is_an_error(word: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        choose_launcher(word, TWO, function=None, world=None).enter()
    assert words in str(caught.value)


@pytest.mark.parametrize("word", ["auto", "script", "fork", "elastic"])
def test_lines_whose_caller_would_go_on_in_every_rank_are_refused_before_anything_starts(word: str) -> None:
    caught = []

    def enter() -> None:
        try:
            choose_launcher(word, TWO, function=None, world=None)
        except ValueError as error:
            caught.append(str(error))

    enter()
    unittest.TextTestRunner().run(unittest.FunctionTestCase(enter))
    thread = threading.Thread(target=enter, name="mine")
    thread.start()
    thread.join()
    callers = ("pytest", "unittest", "the thread 'mine'")
    assert [words.partition(":")[0] for words in caught] == [f"`launch()` in {caller}" for caller in callers]
    assert all("Pass what they do as a function: `launch(function)`." in words for words in caught)


def test_a_fork_in_another_thread_is_refused_with_the_name_of_that_thread() -> None:
    caught = []

    def launch() -> None:
        with pytest.raises(ValueError, match=r".") as found:
            choose_launcher("fork", TWO, function=function, world=None)
        caught.append(str(found.value))

    thread = threading.Thread(target=launch, name="mine")
    thread.start()
    thread.join()
    assert "this process has started the thread 'mine', and a fork copies it alone. Call `launch` before" in caught[0]


LINES = """
import os
from fabric.launchers import Topology, detect_world, join
from fabric.launchers.choose import choose_launcher
def function(world, number):
    join(world, 60, print)
    return world.size * number
{before}
def launch(function, *args):
    launcher = choose_launcher("{word}", Topology(num_processes=2), function=function, world=detect_world(os.environ))
    return launcher.launch(function, *args) if function else launcher.enter()
"""
HEAT = "import torch; torch.set_num_threads(2); torch.randn(4_000_000).add_(1)"


def lines(action: str, word: str = "auto", before: str = "") -> str:
    return LINES.format(word=word, before=before) + "\n" + action + "\n"


ENTER = "import sys; sys.stdout.write(f'rank {launch(None).rank}\\n')"
CALL = "import sys; sys.stdout.write(f'result {launch(function, 21)}\\n')"


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """What the program prints, without the lines of a rank that has waited 5 s for the others on a busy machine."""
    return "".join(line for line in done.stdout.splitlines(keepends=True) if " waits for " not in line)


@pytest.mark.slow
def test_dash_c_and_stdin_continue_in_every_rank() -> None:
    for done in (run(["-c", lines(ENTER)]), run(["-"], stdin=lines(ENTER))):
        assert sorted(done.stdout.split("\n")) == ["", "rank 0", "rank 1"], done.stderr


@pytest.mark.slow
def test_dash_c_and_stdin_run_a_function() -> None:
    for done in (run(["-c", lines(CALL)]), run(["-"], stdin=lines(CALL))):
        assert printed(done) == "result 42\n", done.stderr


@pytest.mark.slow
def test_an_interactive_session_launches_a_function_and_refuses_launch_without_one() -> None:
    adopt = f"import sys, template; template.adopt({template.address()!r})\n"
    done = run(["-i", "-q"], stdin=f"{adopt}{lines(CALL)}\n{ENTER}\n", PYTHONPATH=HARNESS)
    assert "result 42\n" in done.stdout, done.stderr
    assert "rank" not in printed(done)
    assert "Pass what they do as a function: `launch(function)`" in done.stderr


@pytest.mark.slow
def test_dash_c_after_a_tensor_operation_says_which_launcher_works() -> None:
    done = run(["-c", lines(ENTER, before=HEAT)])
    assert done.returncode == 1
    assert "`launch()` in `python -c` cannot fork: this process has " in done.stderr
    assert "or pass what the ranks run: `launch(function)`" in done.stderr


@pytest.mark.slow
def test_dash_c_after_a_tensor_operation_sends_the_function_by_value() -> None:
    done = run(["-c", lines(CALL, before=HEAT)])
    assert printed(done) == "result 42\n", done.stderr


LOCAL = """
import math, sys
import torch
from fabric import Fabric

class Answer:
    def __init__(self, value):
        self.value = value

def main(launcher, state):
    if state == "warm":
        torch.set_num_threads(2)
        torch.randn(4_000_000).add_(1)
    math.patched = "patched"
    weights = torch.ones(3)

    def closure(fabric, scale):
        total = fabric.all_reduce(weights, reduce_op="sum").sum().item()
        return Answer(scale(total)), lambda: total, getattr(math, "patched", "fresh")

    fabric = Fabric(accelerator="cpu", devices=2, launcher=launcher)
    answer, function, found = fabric.launch(closure, lambda total: 7 * total)
    print(isinstance(answer, Answer), answer.value, function(), found)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "state", "found"),
    [("fork", "cold", "patched"), ("auto", "cold", "fresh"), ("auto", "warm", "fresh"), ("spawn", "cold", "fresh")],
)
def test_a_closure_is_launched_and_a_patched_module_is_patched_in_ranks_that_were_forked(
    tmp_path: Path, launcher: str, state: str, found: str
) -> None:
    (tmp_path / "program.py").write_text(LOCAL)
    done = run([tmp_path / "program.py", launcher, state])
    assert done.stdout == f"True 42.0 6.0 {found}\n", done.stderr


@pytest.mark.slow
def test_an_explicit_fork_after_a_tensor_operation_is_an_error_with_the_reason() -> None:
    done = run(["-c", lines(ENTER, word="fork", before=HEAT)])
    assert "`launcher='fork'`: this process has " in done.stderr


@pytest.mark.slow
def test_script_without_a_file_says_which_launcher_works() -> None:
    done = run(["-c", lines(ENTER, word="script")])
    assert "but this is `python -c` and has no file. Write `launcher='fork'`" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "action", "word"),
    [("", ENTER, "fork"), (HEAT, ENTER, "script"), ("", CALL, "forkserver"), (HEAT, CALL, "forkserver")],
)
def test_auto_in_a_file_takes_one_launcher_for_a_function_and_for_lines_what_works_after_what_was_done(
    tmp_path: Path, before: str, action: str, word: str
) -> None:
    """And for a function it says what new processes have of the script, in one line."""
    action += "; sys.stdout.write(detect_world(os.environ).launcher + '\\n' if detect_world(os.environ) else '')"
    (tmp_path / "program.py").write_text(
        lines(f"if __name__ == '__main__':\n    {action}", before=before).replace(
            "return world.size * number", "return world.launcher"
        )
    )
    done = run([tmp_path / "program.py"])
    assert done.returncode == 0, done.stderr
    assert f"result {word}" in done.stdout or done.stdout.count(f"{word}\n") == 2
    said = f"where the globals of {tmp_path}/program.py are as its import leaves them: pass what was set since"
    assert done.stderr.count(said) == (word == "forkserver")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_module_run_by_name_launches_by_script_and_by_forkserver(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("from . import work\nwork.main()\n")
    (tmp_path / "package" / "work.py").write_text(
        "import sys\n" + lines("def main():\n    sys.stdout.write(f'{launch(None).launcher}\\n')", word="script")
    )
    done = run(["-m", "package"], PYTHONPATH=str(tmp_path))
    assert printed(done) == "script\n" * 2, done.stderr
    (tmp_path / "package" / "alone.py").write_text(lines(f"if __name__ == '__main__':\n    {CALL}", word="forkserver"))
    done = run(["-m", "package.alone"], PYTHONPATH=str(tmp_path))
    assert printed(done) == "result 42\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("word", ["forkserver", "spawn"])
def test_a_script_without_a_main_guard_raises_with_what_to_write(tmp_path: Path, word: str) -> None:
    (tmp_path / "program.py").write_text(lines(CALL, word=word))
    done = run([tmp_path / "program.py"])
    assert "globals" not in done.stderr  # said only where the user has not chosen
    assert done.returncode == 1
    assert "under `if __name__ == '__main__':`." in done.stderr.splitlines()[-1]
    assert "program.py launches while another process imports it: a rank, or a worker" in done.stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_a_function_by_script_is_refused_and_by_forkserver_runs_twice(tmp_path: Path) -> None:
    twice = "\n".join(["if __name__ == '__main__':", f"    {CALL}", f"    {CALL}"])
    (tmp_path / "program.py").write_text(lines(twice, word="script"))
    done = run([tmp_path / "program.py"])
    assert done.stdout == ""
    assert "or pass `launcher='forkserver'`, which starts at the function." in done.stderr
    for word in ("forkserver", "fork"):
        (tmp_path / "program.py").write_text(lines(twice, word=word))
        done = run([tmp_path / "program.py"])
        assert printed(done) == "result 42\n" * 2, done.stderr


WORKERS = """
import os, sys
import torch
from torch.utils.data import DataLoader
from fabric import Fabric

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return float(index)

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(sys.argv[2]), launcher=sys.argv[1])
fabric.launch()
workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if fabric.global_rank == 0 else {}
loader = DataLoader(Numbers(), **workers)
for batch in fabric.setup_dataloaders(loader):
    if workers:
        os.write(1, b"batch\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "size"), [("fork", 2), ("script", 2), ("auto", 1)])
def test_a_spawned_worker_of_a_script_without_a_main_guard_says_what_to_write(
    tmp_path: Path, launcher: str, size: int
) -> None:
    """It imports the script, and would launch: as a second rank 0, where its parent is one."""
    (tmp_path / "program.py").write_text(WORKERS)
    done = run([tmp_path / "program.py", launcher, str(size)])
    assert done.returncode == 1
    assert "batch" not in done.stdout
    assert "program.py launches while another process imports it: a rank, or a worker of a `DataLoader`" in done.stderr


GUARDED = """
import os, sys
from torch.utils.data import DataLoader
from fabric import Fabric

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, launcher=sys.argv[1])  # a worker makes one, too

if __name__ == "__main__":
    fabric.launch()
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if fabric.global_rank == 0 else {}
    loader = DataLoader(list(range(4)), **workers)
    for batch in fabric.setup_dataloaders(loader):
        os.write(1, b"batch\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "script"])
def test_a_fabric_that_a_spawned_worker_only_makes_is_no_error(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "program.py").write_text(GUARDED)
    done = run([tmp_path / "program.py", launcher])
    assert (done.returncode, done.stdout) == (0, "batch\n" * 4), done.stderr


CHILD = """
import os, sys
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=int(sys.argv[1]), strategy=sys.argv[2])
fabric.launch()
os.write(1, f"child {fabric.global_rank} of {fabric.world_size} {fabric.all_reduce(1.0, reduce_op='sum')}\\n".encode())
"""
PARENT = """
import multiprocessing, subprocess, sys
from fabric import Fabric
from fabric.launchers import detect_world
import os

launcher, child, size, strategy, way = sys.argv[1:]

def look(found):
    found.put(detect_world(os.environ) is None)

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, launcher=launcher)
    fabric.launch()
    if way == "program":
        subprocess.run([sys.executable, child, size, strategy], check=True)
    else:
        context = multiprocessing.get_context(way)
        found = context.Queue()
        process = context.Process(target=look, args=(found,))
        process.start()
        assert found.get(timeout=60)
        process.join()
    assert detect_world(os.environ).size == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "size", "strategy", "way"),
    [
        ("fork", 1, "auto", "program"),
        ("script", 2, "ddp", "program"),
        ("fork", 0, "", "spawn"),
        ("script", 0, "", "fork"),
    ],
)
def test_a_child_process_of_a_rank_is_no_rank(
    tmp_path: Path, launcher: str, size: int, strategy: str, way: str
) -> None:
    (tmp_path / "program.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    arguments = [tmp_path / "program.py", launcher, tmp_path / "child.py", str(size), strategy, way]
    done = run(arguments, **{template.FORKS: "yes"})
    assert done.returncode == 0, done.stderr
    words = [f"child {rank} of {size} {float(size)}" for rank in range(size)] * 2
    assert sorted(done.stdout.splitlines()) == sorted(words if way == "program" else [])


POOL = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from fabric import Fabric

if __name__ != "__main__":
    import template
    template.adopt(sys.argv[1])

def work(fabric, number):
    return int(fabric.all_reduce(number, reduce_op="sum"))

def trial(launcher, way):
    fabric = Fabric(accelerator="cpu", devices=2, launcher=launcher)
    if way == "function":
        return fabric.launch(work, 3)
    if way == "lambda":
        return fabric.launch(lambda fabric, number: work(fabric, number), 3)
    try:
        fabric.launch()
    except ValueError as error:
        return str(error)

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for launcher, way in (("auto", "function"), ("auto", "lambda"), ("fork", "function"), ("auto", "lines")):
            print(pool.submit(trial, launcher, way).result())
"""


@pytest.mark.slow
def test_a_worker_of_a_process_pool_launches_functions_of_its_script_and_is_refused_lines(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(POOL)
    done = run([tmp_path / "program.py", template.address()], PYTHONPATH=HARNESS)
    *results, refused = done.stdout.splitlines()
    assert results == ["6"] * 3, done.stderr
    assert refused.startswith("`launch()` in concurrent.futures: ")


MOVED = """
import os, sys
if sys.argv[1] == "before":
    os.chdir(sys.argv[2])
from fabric import Fabric
begun = os.getcwd()
if sys.argv[1] == "after":
    os.chdir(sys.argv[2])

def work(fabric):
    return fabric.world_size

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, launcher=sys.argv[3])
    if sys.argv[3] == "script":
        fabric.launch()
        os.write(1, f"{fabric.global_rank} {os.getcwd()} {os.path.isabs(__file__)}\\n".encode())
    else:
        os.write(1, f"{fabric.launch(work)} ranks\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["file", "module", "fabric run"])
def test_a_program_that_has_changed_its_directory_is_found_by_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, way: str
) -> None:
    """Relative to where it was started, as are its arguments: ranks run it from its start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "pack" / "train.py").write_text(MOVED)
    start = {
        "file": ["pack/train.py"],
        "module": ["-m", "pack.train"],
        "fabric run": ["-m", "fabric", "run", "pack/train.py"],
    }
    elsewhere = str(tmp_path / "elsewhere") if when == "before" else "elsewhere"
    done = run([*start[way], when, elsewhere, "script"], fresh=True)  # it imports fabric where it was started
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} {tmp_path}/elsewhere True" for rank in range(2)]
    done = run([*start[way], when, elsewhere, "spawn"], fresh=True)
    assert done.stdout == "2 ranks\n", done.stderr
