"""`fabric.testing.survey`: a failure of one case hides no other, whatever the number of processes."""

from __future__ import annotations

from typing import Any

import pytest
from devices import ACCELERATOR

from fabric.testing import Case, cases, survey
from fabric.testing.run import Outcome


def fall(loop: Any, trial: Any) -> Outcome:
    raise OSError("the disk is full")


FALLS = Case(name="falls", claim="an error that no strategy declares", body=fall)
SGD = cases()[0]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_case_that_raises_is_a_failure_with_its_message_and_the_others_are_run(devices: int) -> None:
    strategy = "single_device" if devices == 1 else "ddp"
    found = survey(strategy, [SGD, FALLS, SGD], devices=devices, accelerator=ACCELERATOR, seed=1)
    assert [(each.case, each.result) for each in found] == [("sgd", "equal"), ("falls", "failed"), ("sgd", "equal")]
    assert found[1].message.startswith("seed 1: ")
    assert "OSError: the disk is full" in found[1].message


def test_arguments_that_are_refused_raise() -> None:
    with pytest.raises(ValueError, match="single_device"):
        survey("single_device", [SGD], devices=2, accelerator=ACCELERATOR)
