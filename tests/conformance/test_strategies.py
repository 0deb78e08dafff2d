"""Every strategy in the registry gives the numbers of one process of plain PyTorch, or raises what it declares.

The cases are those of `fabric.testing`; `rows.py` says which strategy runs through which, with how many ranks and in
which precision. Sizes and numbers are drawn from a seed that is printed, and anew with `--seed new`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels
import pytest
import template
import torch
from measured import declared, in_page, measured_rows, table
from rows import ALIKE, NOT_ON_CPU, STEPPING, THOROUGH, Row, forked_rows, rows, why_not
from worlds import run_each

from fabric import WorkerError, World
from fabric.strategies.capabilities import CAPABILITIES
from fabric.strategies.strategy_registry import strategy_registrations
from fabric.testing import Case, Finding, cases, survey

Show = Callable[[str, list[Finding]], None]


def refuse_failures(*found: tuple[Row, list[Finding]]) -> None:
    failures = [
        f"{row}, {finding.case}: {finding.message}"
        for row, findings in found
        for finding in findings
        if finding.result == "failed"
    ]
    assert not failures, "\n".join(failures)


def stepping(row: Row) -> list[Case]:
    """The cases of the row; with other kernels of optimizers, those that they may change."""
    return [case for case in row.chosen() if kernels.VARIABLE not in os.environ or case.name in STEPPING]


ALONE = ("ddp-2-32-true", "fsdp-2-32-true", "ddp_spawn-2-64-true", "ddp_sharded_spawn-2-64-true")
"""Rows that are launched by themselves, as those of one rank are. The Makefile names the first two over the torch of
torch_xla, where others lack what they need; the last two start ranks of their own kind."""


def groups() -> list[Any]:
    """The rows of each test: those of as many ranks run in the same ones, one after the other. Each case has the models
    of its own trial, and each sixteen a fabric of their own, as in launches of their own (`survey`)."""
    of_tests: dict[tuple[str, bool], list[Row]] = {}
    for row in rows():
        if kernels.VARIABLE in os.environ and str(row) in ALIKE:
            continue
        is_alone = row.size == 1 or str(row) in ALONE
        for number, (part, is_left) in enumerate(row.launches()):
            name = f"{row}{', the rest' * number}" if is_alone else f"{row.size} ranks{', thorough' * is_left}"
            of_tests.setdefault((name, is_left), []).append(part)
    return [
        pytest.param(some, id=name, marks=[pytest.mark.thorough] * is_left)
        for (name, is_left), some in of_tests.items()
    ]


def examined(world: World, row: Row, seed: int) -> list[Finding]:
    return surveyed(row, seed)


def surveyed(row: Row, seed: int) -> list[Finding]:
    words = {"devices": row.size, "precision": row.precision, "tolerance": row.tolerance}
    return survey(row.make(), stepping(row), seed=seed, **words)


@pytest.mark.slow
@pytest.mark.timeout(900)  # where a case fails, each is launched alone
@pytest.mark.parametrize("some", groups())
def test_numbers_are_those_of_one_process_or_what_is_declared_is_raised(some: list[Row], show: Show) -> None:
    calls = [(row, random.randrange(2**31)) for row in some]
    raised = None
    try:
        found = (
            [surveyed(*calls[0])] if len(some) == 1 else [each[0] for each in run_each(some[0].size, examined, calls)]
        )
    except WorkerError as error:  # what a strategy does not declare
        raised, found = error, [surveyed(*call) for call in calls]
    kind = os.environ.get(kernels.VARIABLE)
    for row, findings in zip(some, found, strict=True):
        show(f"{row}, {kind}" if kind else str(row), findings)
    refuse_failures(*zip(some, found, strict=True))
    if raised is not None:
        raise raised


FORKING = """
import random, sys, torch
from rows import forked_rows
from fabric.testing import survey
torch.set_num_threads(1)
random.seed(sys.argv[2])
findings = [survey(row.make(), row.chosen(), devices=row.size, precision=row.precision) for row in forked_rows()]
torch.save(findings, sys.argv[1])
"""


@pytest.mark.slow
def test_ranks_that_are_forks_give_the_numbers_of_one_process(tmp_path: Path, show: Show) -> None:
    written = tmp_path / "findings"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", FORKING, str(written), str(random.random())]
    template.run(command, check=True, timeout=100, env=environ)
    for row, findings in zip(forked_rows(), torch.load(written, weights_only=False), strict=True):
        show(str(row), findings)
        refuse_failures((row, findings))


def test_every_strategy_of_the_registry_is_in_the_suite_or_is_refused_here(
    show_not_run: Callable[[str, str], None],
) -> None:
    names = {name for name, one in strategy_registrations().items() if one.source == "torchfabric"}
    assert names == {row.name for row in (*rows(), *forked_rows())} | set(NOT_ON_CPU)
    for name in NOT_ON_CPU:
        sentence = why_not(name)
        assert sentence is not None, f"{name} runs here, so the suite can run over it"
        show_not_run(name, sentence)


def test_every_strategy_and_every_case_has_a_row_that_is_not_left_to_make_check() -> None:
    kept = [part for row in rows() for part, is_left in row.launches() if not is_left]
    assert {row.name for row in rows()} - {row.name for row in kept} == {
        "deepspeed", "deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "ddp_spawn", "ddp_sharded_spawn",
    }  # fmt: skip
    assert {name for row in kept for name in row.cases} == {case.name for case in cases()}
    assert {(row.name, row.size, row.precision) for row in rows()} >= set(THOROUGH)
    assert {str(row) for row in kept} > set(ALIKE)


def test_every_case_is_run_and_the_names_of_rows_are_those_of_cases() -> None:
    known = {case.name for case in cases()}
    assert {name for row in rows() for name in row.cases} == known


def test_the_table_in_numbers_md_has_these_strategies_and_cases() -> None:
    assert in_page() == table({row.name: declared(row) for row in measured_rows()}), "run `make numbers`"


def test_every_capability_has_a_meaning_and_a_case_that_needs_it() -> None:
    words = set(CAPABILITIES)
    assert {need for case in cases() for need in case.needs} | {"save"} == words  # every case saves
    lacked = {word for row in (*rows(), *forked_rows()) for word in row.make().lacks}
    assert lacked < words
