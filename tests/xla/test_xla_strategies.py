"""Replicas, and one device alone, give the numbers of one process of plain PyTorch: the cases of `fabric.testing`."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from cpu_replicas import CHOSEN, by_part, launch_replicas

from fabric import Fabric
from fabric.strategies.precision.precision import Precision
from fabric.strategies.xla.replicas import XLAStrategy
from fabric.testing import Case, Finding, cases
from fabric.testing.checks import SCALE, examine

SIZE = int(os.environ["CPU_NUM_DEVICES"])
TOLERANCES = {"bf16-true": 5e-2, "16-true": 2e-2, "bf16-mixed": 2e-2, "16-mixed": 5e-3}
"""A graph is rounded to half precision at fewer and other places than one operation after another."""
IN_FEW = ("sgd", "accumulate_and_clip")
"""Cases that say it all where only the precision is another."""

OF_REPLICAS = [case for case in cases() if case.name != "dropout"]
"""The generators of XLA's devices are seeded alike on all ranks, so dropout is the same on every replica."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def findings(strategy: str | XLAStrategy, some: list[Case], precision: str = "32-true") -> dict[str, Finding]:
    """What was seen of cases over replicas, or over one device, in this process."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    value = replace(Precision.parse(precision), init_scale=SCALE)  # type: ignore[arg-type]
    size = 1 if isinstance(strategy, str) else SIZE
    fabric = Fabric(accelerator="xla", strategy=strategy, devices=size, plugins=value)
    if size == 1:
        seen = fabric.launch(examine, some, seed=seed)
    else:
        seen = launch_replicas(fabric, examine, some, seed=seed, tolerance=TOLERANCES.get(precision))[0]
    assert seen is not None
    return {finding.case: finding for finding in seen}


@pytest.fixture(scope="module")
def of_replicas() -> dict[str, Finding]:
    return findings(XLAStrategy(cpu_replicas=True), OF_REPLICAS)


@pytest.fixture(scope="module")
def alone() -> Callable[[str], dict[str, Finding]]:
    """What was seen of a part of the cases over one device."""
    return functools.cache(
        lambda part: findings("single_xla", [case for case in cases() if (case.name in CHOSEN) == (part == "chosen")])
    )


@pytest.mark.parametrize("case", OF_REPLICAS, ids=str)
def test_replicas_give_the_numbers_of_one_process(of_replicas: dict[str, Finding], case: Case) -> None:
    expected = "raised" if {"unused", "bare_parameters", "collective"}.intersection(case.needs) else "equal"
    assert of_replicas[case.name].result == expected, of_replicas[case.name]


@pytest.mark.parametrize(("part", "case"), by_part())
def test_one_device_gives_the_numbers_of_plain_pytorch(
    alone: Callable[[str], dict[str, Finding]], part: str, case: Case
) -> None:
    assert alone(part)[case.name].result == "equal", alone(part)[case.name]


def test_unused_parameters_get_zero_gradients_on_request() -> None:
    some = [case for case in cases() if "unused" in case.needs]
    seen = findings(XLAStrategy(cpu_replicas=True, find_unused_parameters=True), some)
    assert {finding.result for finding in seen.values()} == {"equal"}, seen


def test_one_replica_gives_the_numbers_of_one_process() -> None:
    seen = findings("xla", [case for case in cases() if case.name in IN_FEW])
    assert {finding.result for finding in seen.values()} == {"equal"}, seen


@pytest.mark.parametrize("precision", ["64-true", "32-true", *TOLERANCES])
def test_every_precision_gives_its_numbers(precision: str) -> None:
    some = [case for case in cases() if case.name in IN_FEW]
    seen = findings(XLAStrategy(cpu_replicas=True), some, precision)
    assert {finding.result for finding in seen.values()} == {"equal"}, seen
