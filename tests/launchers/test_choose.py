"""Every launcher word, in the situations in which a person writes it: it works, or the message says which one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

from fabric.launchers import Rendezvous, Topology, World
from fabric.launchers.choose import choose_launcher
from fabric.launchers.external import External

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


@pytest.mark.slow
def test_dash_c_and_stdin_continue_in_every_rank() -> None:
    for done in (run(["-c", lines(ENTER)]), run(["-"], stdin=lines(ENTER))):
        assert sorted(done.stdout.split("\n")) == ["", "rank 0", "rank 1"], done.stderr


@pytest.mark.slow
def test_dash_c_and_stdin_run_a_function() -> None:
    for done in (run(["-c", lines(CALL)]), run(["-"], stdin=lines(CALL))):
        assert done.stdout == "result 42\n", done.stderr


@pytest.mark.slow
def test_an_interactive_session_launches_a_function_and_refuses_launch_without_one() -> None:
    done = run(["-i", "-q"], stdin=lines(CALL) + "\n")
    assert "result 42\n" in done.stdout, done.stderr
    done = run(["-i", "-q"], stdin=lines(ENTER) + "\n")
    assert "Pass what they do as a function: `launch(function)`" in done.stderr


@pytest.mark.slow
def test_dash_c_after_a_tensor_operation_says_which_launcher_works() -> None:
    done = run(["-c", lines(ENTER, before=HEAT)])
    assert done.returncode == 1
    assert "`launch()` in `python -c` cannot fork: this process has " in done.stderr
    assert "`launch(function)` with `launcher='forkserver'`" in done.stderr


@pytest.mark.slow
def test_dash_c_after_a_tensor_operation_sends_the_function_by_value() -> None:
    done = run(["-c", lines(CALL, before=HEAT)])
    assert done.stdout == "result 42\n", done.stderr


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
    ("launcher", "state", "found"), [("auto", "cold", "patched"), ("auto", "warm", "fresh"), ("spawn", "cold", "fresh")]
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
    [("", ENTER, "fork"), (HEAT, ENTER, "script"), ("", CALL, "fork"), (HEAT, CALL, "forkserver")],
)
def test_auto_in_a_file_takes_what_works_after_what_was_done(
    tmp_path: Path, before: str, action: str, word: str
) -> None:
    action += "; sys.stdout.write(detect_world(os.environ).launcher + '\\n' if detect_world(os.environ) else '')"
    (tmp_path / "program.py").write_text(
        lines(f"if __name__ == '__main__':\n    {action}", before=before).replace(
            "return world.size * number", "return world.launcher"
        )
    )
    done = run([tmp_path / "program.py"])
    assert done.returncode == 0, done.stderr
    assert f"result {word}" in done.stdout or done.stdout.count(f"{word}\n") == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_a_module_run_by_name_launches_by_script_and_by_forkserver(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("from . import work\nwork.main()\n")
    (tmp_path / "package" / "work.py").write_text(
        "import sys\n" + lines("def main():\n    sys.stdout.write(f'result {launch(function, 21)}\\n')", word="script")
    )
    done = run(["-m", "package"], PYTHONPATH=str(tmp_path))
    assert done.stdout == "result 42\n", done.stderr
    (tmp_path / "package" / "alone.py").write_text(lines(f"if __name__ == '__main__':\n    {CALL}", word="forkserver"))
    done = run(["-m", "package.alone"], PYTHONPATH=str(tmp_path))
    assert done.stdout == "result 42\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("word", ["forkserver", "spawn"])
def test_a_script_without_a_main_guard_raises_with_what_to_write(tmp_path: Path, word: str) -> None:
    (tmp_path / "program.py").write_text(lines(CALL, word=word))
    done = run([tmp_path / "program.py"])
    assert done.returncode == 1
    assert "under `if __name__ == '__main__':`." in done.stderr.splitlines()[-1]
    assert "program.py launches while another process imports it: a rank, or a worker" in done.stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_a_second_function_by_script_is_refused_and_by_forkserver_runs(tmp_path: Path) -> None:
    twice = "\n".join(["if __name__ == '__main__':", f"    {CALL}", f"    {CALL}"])
    (tmp_path / "program.py").write_text(lines(twice, word="script"))
    done = run([tmp_path / "program.py"])
    assert done.stdout == "result 42\n"
    assert "Pass `launcher='forkserver'`, which starts at the function." in done.stderr
    for word in ("forkserver", "fork"):
        (tmp_path / "program.py").write_text(lines(twice, word=word))
        done = run([tmp_path / "program.py"])
        assert done.stdout == "result 42\n" * 2, done.stderr
