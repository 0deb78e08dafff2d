"""The suite of `tests/conformance` over devices: every strategy gives the numbers of plain PyTorch on one device.

Its rows, and those that the CPU refuses. What is in float64 there is in float32 here, as on a user's GPU; bf16-true and
16-mixed, which `make test` leaves out there, run here. Pipelines and context parallelism have no row: their own tests
run on both (`ON_BOTH` in the Makefile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from rows import FEW, GATHERED_IN_HALF, MOST, ON_FOUR_RANKS, Row, rows

from fabric.strategies.strategy_registry import make_strategy
from fabric.testing import Finding, survey

ONLY_HERE = (
    ("hsdp", 4, "bf16-mixed", FEW),
    ("hsdp", 4, "16-mixed", FEW),
    ("fsdp_cpu_offload", 2, "32-true", MOST),
)
WHOLE = ("single_device", "fsdp")
"""On up to two ranks every case of these is run, of other strategies those that say most."""
LEFT = (
    "dp",
    "ddp_find_unused_parameters_true",
    "ddp_spawn",
    "ddp_sharded_spawn",
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_1_offload",
    "deepspeed_stage_2_offload",
)
"""Left to `make check`: beside each is a row that says nearly the same."""
ON_FOUR = ("hsdp", "model_parallel")
"""Of these, four ranks have a mesh of two axes; of others they do what two ranks do."""
AS_ON_THE_CPU = (("fsdp", "bf16-mixed"), ("hsdp", "bf16-mixed"), ("ddp_sharded", "bf16-mixed"), ("manual", "16-mixed"))
"""Left to `make check`: `ddp` runs in bf16-mixed here and `fsdp` in 16-mixed, and all but `hsdp` run in `make test`."""


def on_devices() -> list[Row]:
    """Each strategy, number of ranks and precision once."""
    found = {}
    for row in rows():
        precision = "32-true" if row.precision == "64-true" else row.precision
        found.setdefault((row.name, row.size, precision), replace(row, precision=precision))
    for name, size, precision, some in ONLY_HERE:
        found[name, size, precision] = Row(
            name=name,
            size=size,
            precision=precision,
            cases=some,
            make=partial(make_strategy, name),
            tolerance=GATHERED_IN_HALF.get(("fsdp", precision)),
        )
    return list(found.values())


def launches() -> Iterator[tuple[str, Row, bool]]:
    """What runs in one launch each, and whether it is left to `make check`."""
    for row in on_devices():
        is_left = row.name in LEFT or row.precision == "16-true" or (row.name, row.precision) in AS_ON_THE_CPU
        is_left |= row.size == 4 and row.precision in (
            "bf16-true",
            "16-mixed",
        )  # two ranks run in these, four in bf16-mixed
        is_left |= row.name not in {1: ("single_device",), 4: ON_FOUR}.get(row.size, row.name)
        names = row.cases if row.name in WHOLE and row.size < 4 else ON_FOUR_RANKS if row.size == 4 else MOST
        if row.name.endswith("_offload"):  # optimizers and their states are elsewhere, all else is as without
            names = (*FEW, "optimizer_state")
        kept = tuple(name for name in row.cases if name in names)
        rest = tuple(name for name in row.cases if name not in kept)
        yield str(row), replace(row, cases=kept), is_left
        if rest:
            yield f"{row}, the rest", replace(row, cases=rest), True


@pytest.mark.slow
@pytest.mark.timeout(600)  # where a case fails, each is launched alone
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.thorough if is_left else (), id=name) for name, row, is_left in launches()],
)
def test_numbers_are_those_of_plain_pytorch_on_one_device(row: Row, show: Callable[[str, list[Finding]], None]) -> None:
    words = {"devices": row.size, "precision": row.precision, "tolerance": row.tolerance}
    findings = survey(row.make(), row.chosen(), accelerator="cuda", **words)
    show(f"{row} on cuda", findings)
    failures = [f"{row}, {each.case}: {each.message}" for each in findings if each.result == "failed"]
    assert not failures, "\n".join(failures)
