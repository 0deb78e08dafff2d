"""A package of somebody else runs the suite over its strategies: the right ones pass, the wrong ones do not."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import template

PACKAGE = '''
"""Strategies that are ddp, but for one thing."""

from dataclasses import dataclass, replace

from fabric.strategies import DDPStrategy, Strategy

NO_VALUES = "The outside strategy clips no values. Pass `max_norm`."


@dataclass(frozen=True, kw_only=True)
class Outside(Strategy):
    says_what_it_lacks: bool = True
    raises_what_it_lacks: bool = True
    sums: bool = False
    inner = DDPStrategy()

    @property
    def lacks(self):
        return {**self.inner.lacks, "clip_value": NO_VALUES} if self.says_what_it_lacks else self.inner.lacks

    @property
    def launchers(self):
        return self.inner.launchers

    def refuse(self, target):
        return self.inner.refuse(target)

    def connect(self, *place):
        return self.inner.connect(*place)

    def init_module(self, runtime, *, empty):
        return self.inner.init_module(runtime, empty=empty)

    def setup(self, runtime, module, optimizers, move):
        prepared = self.inner.setup(runtime, module, optimizers, move)

        def clip_value(optimizer, clip_val):
            if self.raises_what_it_lacks:
                raise ValueError(NO_VALUES)
            prepared.clip_value(optimizer, clip_val)

        def scale_loss(loss):
            return loss * runtime.world.size if self.sums else loss

        return replace(prepared, scale_loss=scale_loss, clip_value=clip_value)

    def setup_optimizers(self, runtime, optimizers):
        return self.inner.setup_optimizers(runtime, optimizers)


def summed():
    return Outside(sums=True)


def modest():
    return Outside(raises_what_it_lacks=False)


def boastful():
    return Outside(says_what_it_lacks=False)
'''
ENTRY_POINTS = """
[fabric.strategies]
outside = outside:Outside
outside_summed = outside:summed
outside_modest = outside:modest
outside_boastful = outside:boastful
"""
TESTS = """
import pytest
from fabric.testing import cases, check

SOME = [case for case in cases() if case.name in ("sgd", "clip_value")]


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("name", ["outside", "outside_summed", "outside_modest", "outside_boastful"])
def test_strategy(name, case):
    check(name, case, devices=2, seed=1)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wrong_strategy_fails_and_a_right_one_passes(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(PACKAGE)
    installed = tmp_path / "outside-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "test_outside.py").write_text(TESTS)
    output = template.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_outside.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    ).stdout
    lines = re.findall(r"^(PASSED|FAILED) test_outside.py::test_strategy\[(\S+)\]", output, re.MULTILINE)
    ended = {name: outcome for outcome, name in lines}
    assert ended == {
        "outside-sgd": "PASSED",
        "outside-clip_value": "PASSED",
        "outside_summed-sgd": "FAILED",
        "outside_summed-clip_value": "PASSED",
        "outside_modest-sgd": "PASSED",
        "outside_modest-clip_value": "FAILED",
        "outside_boastful-sgd": "PASSED",
        "outside_boastful-clip_value": "FAILED",
    }, output
    for words in (
        r"sgd \(ten steps of SGD with momentum\) over 'outside_summed', 2 devices: seed \d+, Sizes",
        r"the strategy declares 'The outside strategy clips no values. Pass `max_norm`.', but nothing was raised",
        r"ValueError: The outside strategy clips no values.",
    ):
        assert re.search(words, output), f"{words!r} is not in:\n{output}"
