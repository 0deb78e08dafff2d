"""Code written for Lightning Fabric on two ranks, and the page that tells how to come from there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import run

PAGE = Path(__file__).parents[3] / "docs/coming-from/lightning.md"

PROGRAM = """
import json, os, sys
from functools import partial
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from fabric.lightning import Fabric, seed_everything
from fabric.lightning.loggers import CSVLogger
from fabric.lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from fabric.lightning.utilities import rank_zero_only
from fabric.lightning.utilities.types import ReduceOp


def parallelize(model, mesh):
    assert mesh.mesh_dim_names == ("data_parallel", "tensor_parallel"), mesh
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


class Hooks:
    steps = 0

    def on_after_optimizer_step(self, optimizer):
        self.steps += 1


STRATEGIES = {
    "single": lambda: "auto",
    "ddp": lambda: DDPStrategy(bucket_cap_mb=1),
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=10)),
    "sharded": lambda: FSDPStrategy(state_dict_type="sharded"),
    "mesh": lambda: ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1),
    "deepspeed": lambda: DeepSpeedStrategy(stage=2, overlap_comm=False),
}


def to_whole(tensor):
    return tensor.full_tensor() if "full_tensor" in dir(tensor) else tensor


def main(fabric, folder):
    seed_everything(1, verbose=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    rows = torch.randn(16, 4)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=8 // fabric.world_size))
    norms = []
    for batch in loader:
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        fabric.backward(loss)
        norms.append(fabric.clip_gradients(None, optimizer, max_norm=0.5).item())
        optimizer.step()
        loss = loss.detach()
        fabric.all_reduce(loss)
        fabric.logger.log_metrics({"loss": loss})
        fabric.log("mean", loss)
    W = fabric.world_size
    gathered = fabric.all_gather(torch.tensor([1.0 + fabric.global_rank, 5.0]))
    assert gathered.shape == ((W, 2) if W > 1 else (2,)), gathered
    total = torch.tensor(2 + fabric.global_rank)
    assert fabric.all_reduce(total, reduce_op=ReduceOp.SUM) is total and total == (5 if W > 1 else 2)
    if W > 1:
        try:
            fabric.all_reduce(torch.tensor(3))
        except TypeError as error:
            assert "Pass `tensor.float()`, or write `reduce_op='sum'`." in str(error)
        else:
            raise AssertionError
    with fabric.rank_zero_first():
        assert rank_zero_only(lambda: "said")() == ("said" if fabric.is_global_zero else None)
    mesh = fabric.strategy.device_mesh
    names = None if mesh is None else mesh.mesh_dim_names
    fabric.save(folder + "/model.ckpt", {"model": model, "loader": loader})
    assert os.path.isdir(folder + "/model.ckpt") == fabric.strategy.saves_shards
    saved = {name: to_whole(each).clone() for name, each in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    fabric.load(folder + "/model.ckpt", {"model": model, "loader": loader})
    if word != "deepspeed":  # whose engine writes its own parameters
        assert all(torch.equal(saved[name], to_whole(each)) for name, each in model.state_dict().items())
    return {"norms": norms, "loss": loss.item(), "steps": fabric._callbacks[0].steps, "mesh": names,
            "strategy": type(fabric.strategy).__name__, "world_size": fabric.strategy.world_size}


if __name__ == "__main__":
    word, devices, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    logger = CSVLogger(root_dir=folder, name=None, version=0)
    fabric = Fabric("cpu", STRATEGIES[word](), devices, loggers=logger, callbacks=[Hooks()])
    assert fabric.world_size == devices
    local = "of the process that launches"
    result = fabric.launch(lambda fabric, folder: {**main(fabric, folder), "local": local}, folder)
    fabric.print(json.dumps(result))
"""


def ended(tmp_path: Path, word: str, devices: int) -> dict[str, object]:
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = tmp_path / f"{word}-{devices}"
    folder.mkdir()
    done = run([tmp_path / "program.py", word, str(devices), folder])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"norms"')]
    assert len(lines) == 1, done.stdout
    assert len((folder / "version_0" / "metrics.csv").read_text().splitlines()) == 5
    result: dict[str, object] = json.loads(lines[0])
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_under_each_strategy_train_as_one_and_go_on_after_launch(tmp_path: Path) -> None:
    alone = ended(tmp_path, "single", 1)
    assert alone["strategy"] == "SingleDeviceStrategy"
    kinds = {
        "ddp": "DDPStrategy",
        "fsdp": "FSDPStrategy",
        "sharded": "FSDPStrategy",
        "mesh": "ModelParallelStrategy",
        "deepspeed": "DeepSpeedStrategy",
    }
    for word, kind in kinds.items():
        together = ended(tmp_path, word, 2)
        assert together["norms"] == pytest.approx(alone["norms"], rel=1e-4), word
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4), word
        assert (together["strategy"], together["world_size"], together["steps"]) == (kind, 2, 2)
        assert together["local"] == "of the process that launches"
        assert word != "mesh" or together["mesh"] == ["data_parallel", "tensor_parallel"]


BY_FUNCTION = """
import sys
import torch
from torch.utils.data import DataLoader
from fabric.lightning import Fabric, seed_everything
from fabric.lightning.strategies import DDPStrategy

class Draws(torch.utils.data.Dataset):
    __len__ = lambda self: 8
    __getitem__ = lambda self, index: torch.rand(1)

def main(fabric, number):
    assert fabric.strategy.world_size == fabric.world_size == 2
    seed_everything(3, workers=True, verbose=False)
    loader = fabric.setup_dataloaders(DataLoader(Draws(), batch_size=2, num_workers=1))
    drawn = fabric.all_gather(torch.cat(list(loader)))
    assert len(drawn.unique()) == drawn.numel() == 8, drawn
    return fabric.all_gather(fabric.strategy.global_rank + number)

if __name__ == "__main__":
    fabric = Fabric("cpu", DDPStrategy(start_method=sys.argv[1]), 2)
    print("rank 0 gave", fabric.launch(main, 5).tolist())
"""


@pytest.mark.slow
def test_with_a_start_method_ranks_end_with_the_function_and_workers_of_ranks_draw_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(BY_FUNCTION)
    done = run([tmp_path / "program.py", "forkserver"])
    assert (done.returncode, done.stdout) == (0, "rank 0 gave [5, 6]\n"), done.stderr


@pytest.mark.slow
def test_the_program_in_from_lightning_md_runs(tmp_path: Path) -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{block}")
    done = run([tmp_path / "program.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["Sequential 32-true"]
    assert (tmp_path / "model.ckpt").exists()
    assert len((tmp_path / "logs" / "version_0" / "metrics.csv").read_text().splitlines()) == 4


def test_the_diff_in_from_lightning_md_names_existing_methods() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    added = "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+"))
    names: dict[str, object] = {}
    exec(added, names)
    assert {"Fabric", "seed_everything", "FSDPStrategy", "CSVLogger"} <= set(names)
