"""Run cases over a strategy, and return a finding for each.

Each launch draws sizes and numbers from a new seed, which is printed and part of every failure; passing it draws the
same.
"""

import random
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, final

import torch
from torch.utils.data import DataLoader

from fabric.fabric import Fabric
from fabric.launchers.launcher import WorkerError
from fabric.strategies.data.transfer import move
from fabric.strategies.precision.precision import Precision, PrecisionInput
from fabric.strategies.strategy import Strategy
from fabric.testing.cases import Case, cases
from fabric.testing.drawn import Sizes, Trial
from fabric.testing.plain import SCALE, plain
from fabric.testing.run import Outcome

Result: TypeAlias = Literal["equal", "raised", "failed"]

# Note [Loops in half precision]
# Rounding in another order makes losses in half precision diverge, by an amount that depends on the drawn numbers: with
# weights in float16, clipping and AdamW, between 0.002 and 0.7 (15 seeds). So two runs may differ as much as two that
# both differ from float32 as the plain one does, or by the tolerance.

TOLERANCES: Mapping[str, float] = {
    "64-true": 1e-10,
    "32-true": 1e-5,
    "bf16-true": 2e-2,  # two units in the last place of a loss of 2 to 4
    "16-true": 4e-3,
    "bf16-mixed": 1e-4,
    "16-mixed": 1e-4,
}
"""Relative and absolute tolerance, by precision."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one case."""

    case: str
    result: Result
    message: str = ""
    """The failure, or the error message that was raised as declared."""


def check(
    strategy: str | Strategy,
    case: Case,
    *,
    devices: int = 2,
    precision: PrecisionInput | Precision = "32-true",
    accelerator: str = "cpu",
    tolerance: float | None = None,
    seed: int | None = None,
) -> None:
    """Run one case over a strategy: its numbers are those of one process of plain PyTorch, or it raises as declared.

    It launches `devices` ranks. `tolerance`: relative and absolute; None: that of the precision.
    `seed`: None draws one, and prints it.
    Raises: AssertionError: neither holds, with the seed; ValueError: the strategy cannot run with these arguments.
    """
    (finding,) = survey(
        strategy, [case], devices=devices, precision=precision, accelerator=accelerator, tolerance=tolerance, seed=seed
    )
    if finding.result == "failed":
        raise AssertionError(f"{case.name} ({case.claim}) over {strategy!r}, {devices} devices: {finding.message}")


def survey(
    strategy: str | Strategy,
    these: Sequence[Case] | None = None,
    *,
    devices: int = 2,
    precision: PrecisionInput | Precision = "32-true",
    accelerator: str = "cpu",
    tolerance: float | None = None,
    seed: int | None = None,
) -> list[Finding]:
    """Run cases (None: all) over a strategy in a few launches, and return the result of each, in their order.

    If a case raises an error that the strategy does not declare, its launch ends; each case is then launched
    separately, so that one failure hides no other. Arguments and errors as in `check`, but failures are returned.
    """
    chosen = list(cases() if these is None else these)
    seed = random.randrange(2**31) if seed is None else seed
    print(f"fabric.testing: seed {seed}")
    value = replace(Precision.parse(precision), init_scale=SCALE)
    raised = WorkerError if devices > 1 else Exception  # in one process, what the case itself raises

    def make() -> Fabric:
        return Fabric(accelerator=accelerator, strategy=strategy, devices=devices, plugins=value)

    def launch(some: Sequence[Case]) -> list[Finding]:
        return make().launch(examine, some, seed=seed, tolerance=tolerance) or []

    def launch_alone(case: Case) -> Finding:
        try:
            return launch([case])[0]
        except raised as error:
            lines = [str(error)] if isinstance(error, WorkerError) else traceback.format_exception(error)
            return Finding(case=case.name, result="failed", message=f"seed {seed}: {''.join(lines)}")

    make()  # refused arguments raise here
    if len(chosen) > 1:
        # 16 in a launch: the sanitizer compares all models that a fabric has set up, those of earlier cases as well.
        with suppress(raised):
            return [each for start in range(0, len(chosen), 16) for each in launch(chosen[start : start + 16])]
    return [launch_alone(case) for case in chosen]


def examine(
    fabric: Fabric, these: Sequence[Case] | None = None, *, seed: int, tolerance: float | None = None
) -> list[Finding]:
    """Run cases (None: all) over a launched fabric, and return the result of each, in their order.

    For scripts that are started by an external launcher, such as `torchrun`. Under a precision that scales losses, pass
    `Fabric(plugins=...)` a `Precision` whose `init_scale` is 256. Ranks: all call it, with the same
    arguments; use the result of rank 0. They need a shared folder for temporary files.
    Raises: any error of a case that the strategy does not declare.
    """
    trial = draw(fabric, seed)
    limit = TOLERANCES[trial.precision.name] if tolerance is None else tolerance
    findings = []
    for case in cases() if these is None else these:
        findings.append(_examine(fabric, case, trial, limit))
        fabric.barrier()  # ranks may be threads: the next case must not seed while rank 0 draws for this one
    return findings


def draw(fabric: Fabric, seed: int) -> Trial:
    """The trial that the seed draws for this fabric. Ranks: all call it."""
    num_shares, batch_size = count_shares(fabric), Sizes.draw(seed).batch_size
    return Trial(
        seed=seed,
        precision=fabric._configuration.precision,
        num_shares=num_shares,
        step_size=num_shares * batch_size,
        batch_size=batch_size,
        least_tail=num_shares,
        lacks=frozenset(fabric.strategy.lacks),
    )


def count_shares(fabric: Fabric) -> int:
    """The number of shares that the strategy distributes the data over. Ranks: all call it."""
    every = range(fabric.world_size)
    mine = list(fabric.setup_dataloaders(DataLoader(every, batch_size=1)))  # type: ignore[arg-type]
    return fabric.world_size // len(mine)


def _examine(fabric: Fabric, case: Case, trial: Trial, tolerance: float) -> Finding:
    sentences = [fabric.strategy.lacks[need] for need in case.needs if need in fabric.strategy.lacks]
    try:
        found = case.body(fabric, trial)
    except Exception as error:
        for sentence in sentences:
            if sentence in str(error):
                return Finding(case=case.name, result="raised", message=sentence)
        raise
    if sentences and fabric.world_size > 1:  # with one rank, many strategies support it anyway
        message = f"seed {trial.seed}: the strategy declares {sentences[0]!r}, but nothing was raised"
        return Finding(case=case.name, result="failed", message=message)
    if not fabric.is_global_zero:
        return Finding(case=case.name, result="equal")
    by_share = case.by_share or trial.precision.compute_dtype not in (torch.float32, torch.float64)
    num_copies = trial.num_shares if by_share else 1
    alone = trial.in_one_process(num_copies)
    cpu = torch.device("cpu")
    device = cpu if fabric.accelerator.is_recorded else fabric.device  # plain PyTorch would have to mark steps there

    def in_plain(trial: Trial) -> dict[str, Any]:
        return named(move(plain(lambda loop: case.body(loop, trial), trial.precision, device, num_copies), cpu))

    expected = in_plain(alone)
    if trial.dtype in (torch.float16, torch.bfloat16):  # Note [Loops in half precision]
        exact = in_plain(replace(alone, precision=Precision.parse("32-true")))
        tolerance = max(tolerance, 2 * _distance(expected, exact))
    try:
        torch.testing.assert_close(named(move(found, cpu)), expected, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return Finding(case=case.name, result="failed", message=f"seed {trial.seed}, {trial.sizes}: {error}")
    return Finding(case=case.name, result="equal")


def named(outcome: Outcome) -> dict[str, Any]:
    """The fields by name, without the copies that `dataclasses.asdict` makes."""
    return {field.name: getattr(outcome, field.name) for field in fields(outcome)}


def _distance(one: Any, other: Any) -> float:
    """The largest difference between the numbers of two nests with the same structure."""
    if isinstance(one, torch.Tensor):
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, float):
        return abs(one - float(other))
    if isinstance(one, Mapping):
        return max((_distance(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        return max((_distance(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    return 0.0
