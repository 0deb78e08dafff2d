"""The errors of the package, all of them."""

from __future__ import annotations

import copy
import pickle
import pkgutil
from importlib import import_module
from typing import Any

import pytest

import fabric


def error_classes() -> list[type[Exception]]:
    """Every exception class that a module of the package defines; modules of optional backends may not be there."""
    found = set()
    for module in pkgutil.walk_packages(fabric.__path__, "fabric.", onerror=lambda name: None):
        if not module.name.startswith("fabric.__"):
            try:
                names = vars(import_module(module.name))
            except ImportError:
                continue
            found |= {each for each in names.values() if isinstance(each, type) and issubclass(each, Exception)}
    return sorted((each for each in found if each.__module__.startswith("fabric.")), key=lambda each: each.__name__)


ERRORS = error_classes()


def test_the_errors_with_a_rank_are_among_those_that_are_found() -> None:
    names = {each.__name__ for each in ERRORS}
    assert names >= {"WorkerError", "CollectiveError", "CheckpointError", "CheckpointEntryError", "SanitizerError"}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_go_through_pickle_and_copy_with_all_their_attributes(kind: type[Exception]) -> None:
    given: dict[str, Any] = {"rank": 3, "exit_code": 4, "signal": 9, "cause": ValueError("a fish"), "lost": [1]}
    options = getattr(kind.__init__, "__kwdefaults__", None) or {}
    assert options.keys() <= given.keys()
    error = kind("words", **{name: given[name] for name in options})
    error.note = "of the program"  # type: ignore[attr-defined]
    copies = [copy.copy(error), *(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6))]
    for each in copies:
        assert (type(each), str(each)) == (kind, str(error))
        assert {name: repr(value) for name, value in vars(each).items()} == {
            name: repr(value) for name, value in vars(error).items()
        }
        assert repr(each.__cause__) == repr(error.__cause__)


def test_a_worker_error_whose_cause_cannot_be_pickled_goes_through_pickle_without_it() -> None:
    class LocalError(Exception):
        pass

    assert pickle.loads(pickle.dumps(fabric.WorkerError("words", rank=1, cause=LocalError()))).cause is None
