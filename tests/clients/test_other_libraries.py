"""Models, optimizers and data of other libraries train on two ranks as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from other_libraries import PROGRAMS, run_all
from worlds import preload

from fabric import Fabric
from fabric.strategies import DDPStrategy, Strategy

REFUSED = ("schedule_free",)
"""In `setup`, where ranks have the state of a part: `tests/strategies/optimizers/test_optimizer_modes.py`."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of these libraries
]


@pytest.fixture(autouse=True, scope="module")
def ranks_import_nothing() -> None:
    preload("tensordict", "torch_geometric", "vector_quantize_pytorch", "pytorch_optimizer", "gymnasium")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Of one process."""
    found = Fabric(accelerator="cpu", devices=1).launch(run_all, PROGRAMS, str(tmp_path_factory.mktemp("one")))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "ddp_find_unused_parameters_true",
        pytest.param(DDPStrategy(shard_optimizer=True), id="ddp_shard_optimizer"),
        "fsdp",
        "ddp_sharded",
        "ddp_fully_sharded",
        "deepspeed_stage_2",
        "deepspeed_stage_3",
    ],
)
def test_programs_have_the_losses_and_weights_of_one_process(
    strategy: Strategy | str, expected: dict[str, tuple[list[float], dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    refuses = isinstance(strategy, DDPStrategy) or strategy in ("ddp_sharded", "deepspeed_stage_2", "deepspeed_stage_3")
    names = [name for name in PROGRAMS if not (refuses and name in REFUSED)]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, launcher="forkserver")
    found = fabric.launch(run_all, names, str(tmp_path))
    assert found is not None
    for name in names:
        (losses, weights), (right_losses, right_weights) = found[name], expected[name]
        assert losses == pytest.approx(right_losses, rel=1e-5), name
        torch.testing.assert_close(
            weights, right_weights, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
