"""The options of `fabric run` reach the program that was run and its own processes, and no other."""

from __future__ import annotations

import pytest

from fabric.configure.run_options import ProgramId, as_variable, options_in

TRAIN = ProgramId(arguments=("train.py", "--lr", "3"), main="/home/train.py")
ENVIRON = as_variable({"devices": "2"}, TRAIN)


def test_without_fabric_run_there_are_no_options() -> None:
    assert options_in({}, TRAIN) == {}


@pytest.mark.parametrize(
    "program",
    [
        TRAIN,
        ProgramId(arguments=("-c", "from multiprocessing.spawn import spawn_main"), main="/home/train.py"),
        ProgramId(arguments=("train.py", "--lr", "3"), main="/usr/lib/debugger.py"),
    ],
    ids=["itself", "its multiprocessing child", "itself under a debugger"],
)
def test_options_reach_the_program_that_fabric_run_started(program: ProgramId) -> None:
    assert options_in(ENVIRON, program) == {"devices": "2"}


@pytest.mark.parametrize(
    "program",
    [
        ProgramId(arguments=("evaluate.py",), main="/home/evaluate.py"),
        ProgramId(arguments=("-m", "train"), main="-m train"),
        ProgramId(arguments=("-c", "print()"), main=None),
    ],
    ids=["another script", "a module of the same name", "no script"],
)
def test_options_do_not_reach_another_program(program: ProgramId) -> None:
    assert options_in(ENVIRON, program) == {}


def test_a_program_without_main_is_not_every_program_without_main() -> None:
    nameless = ProgramId(arguments=("-c", "1"), main=None)
    assert options_in(as_variable({"devices": "2"}, nameless), ProgramId(arguments=("-c", "2"), main=None)) == {}
