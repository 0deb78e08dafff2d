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

import kernels
import pytest
import template
import torch
from measured import declared, in_page, measured_rows, table
from rows import ALIKE, NOT_ON_CPU, STEPPING, THOROUGH, Row, forked_rows, rows, why_not

from fabric.strategies.capabilities import CAPABILITIES
from fabric.strategies.strategy_registry import strategy_registrations
from fabric.testing import Case, Finding, cases, survey

Show = Callable[[str, list[Finding]], None]


def refuse_failures(row: Row, findings: list[Finding]) -> None:
    failures = [f"{row}, {finding.case}: {finding.message}" for finding in findings if finding.result == "failed"]
    assert not failures, "\n".join(failures)


def stepping(row: Row) -> list[Case]:
    """The cases of the row; with other kernels of optimizers, those that they may change."""
    return [case for case in row.chosen() if kernels.VARIABLE not in os.environ or case.name in STEPPING]


@pytest.mark.slow
@pytest.mark.timeout(600)  # where a case fails, each is launched alone
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(part, marks=pytest.mark.thorough if is_left else (), id=f"{part}{', the rest' * number}")
        for row in rows()
        if kernels.VARIABLE not in os.environ or str(row) not in ALIKE
        for number, (part, is_left) in enumerate(row.launches())
    ],
)
def test_numbers_are_those_of_one_process_or_what_is_declared_is_raised(row: Row, show: Show) -> None:
    findings = survey(row.make(), stepping(row), devices=row.size, precision=row.precision, tolerance=row.tolerance)
    kind = os.environ.get(kernels.VARIABLE)
    show(f"{row}, {kind}" if kind else str(row), findings)
    refuse_failures(row, findings)


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
        refuse_failures(row, findings)


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
