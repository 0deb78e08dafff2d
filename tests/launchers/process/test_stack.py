"""The user's line in a stack."""

from __future__ import annotations

import inspect

from fabric.launchers.process.stack import END, users_line
from fabric.loop.gather_parameters import gathered
from fabric.session import Session
from fabric.strategies.collectives.rank_zero_broadcast import rank_zero_first


def test_a_context_manager_is_named_as_the_method_of_fabric_that_returns_it() -> None:
    for function in (gathered, rank_zero_first):
        name, file = function.__name__, inspect.getsourcefile(inspect.unwrap(function))
        assert users_line([(str(file), 1, name), ("/train.py", 2, "main")]) == f"fabric.{name}, /train.py:2 in main"


def test_a_session_that_closes_at_exit_is_at_the_end_of_the_program() -> None:
    end = Session._close_at_exit
    assert users_line([(str(inspect.getsourcefile(end)), 1, end.__name__), ("/train.py", 2, "main")]) == END
