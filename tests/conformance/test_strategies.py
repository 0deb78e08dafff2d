"""Every strategy in the registry gives the numbers of one process of plain PyTorch.

10 steps, SGD with momentum and AdamW, tied weights, accumulation, clipping; every precision; 1, 2 and 4 ranks. The seed
is drawn anew in each run and printed, so that the suite finds what nobody thought of.
"""

from __future__ import annotations

import random

import pytest
import torch
from loops import OPTIMIZERS, Outcome, Task, all_tasks, plain

from fabric import Fabric
from fabric.strategies import available_strategies
from fabric.strategies.precision.precision import Precision

TOLERANCES = {
    "64-true": 1e-10,
    "32-true": 1e-5,
    # Half precision: the ranks' gradients are rounded one by one, and their mean again.
    "bf16-true": 0.1,
    "16-true": 2e-2,
    "bf16-mixed": 5e-2,
    "16-mixed": 1e-2,
}
ONE_PROCESS = ("single_device", "dp")
BY_SPAWN = ("ddp_spawn",)


def rows() -> list[tuple[str, int, str]]:
    """Strategy, ranks and precision. Spawn starts each rank with an import of torch: there one row says it all."""
    strategies = [
        (name, size) for name in available_strategies() for size in ((1,) if name in ONE_PROCESS else (1, 2, 4))
    ]
    rows = [(name, size, "32-true") for name, size in strategies if name not in BY_SPAWN or size == 2]
    rows += [(name, size, "64-true") for name, size in strategies if name not in BY_SPAWN]
    rows += [(name, size, word) for name, size in (("single_device", 1), ("ddp", 2)) for word in list(TOLERANCES)[2:]]
    return rows


def tasks(seed: int) -> list[Task]:
    """Each optimizer alone, in windows of two micro-batches, and clipped."""
    return [
        *(Task(seed=seed, optimizer=optimizer) for optimizer in OPTIMIZERS),
        Task(seed=seed, optimizer="sgd", accumulate=2),
        Task(seed=seed, optimizer="adamw", accumulate=2, max_norm=0.05),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size", "precision"), rows())
def test_losses_and_weights_equal_those_of_one_process(strategy: str, size: int, precision: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=size, precision=precision)
    outcomes = fabric.launch(all_tasks, tasks(seed))
    assert outcomes is not None
    for task, outcome in zip(tasks(seed), outcomes, strict=True):
        expected = plain(task, Precision.parse(precision))  # type: ignore[arg-type]
        compare(outcome, expected, TOLERANCES[precision])


def compare(outcome: Outcome, expected: Outcome, tolerance: float) -> None:
    """Raise AssertionError where losses or weights differ by more than the tolerance."""
    torch.testing.assert_close(outcome.losses, expected.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(outcome.weights, expected.weights, rtol=tolerance, atol=tolerance)
