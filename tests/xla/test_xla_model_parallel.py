"""A mesh of devices, over which a function marks the model: the numbers of one process, with weights in parts.

Four devices, in a process of its own, for SPMD is for good.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy, XLAModelParallelStrategy
from fabric.strategies.model_parallel.pipeline.options import Pipeline

SIZE = int(os.environ["CPU_NUM_DEVICES"])
OF_DEVICES = 4
MESHES: dict[str, dict[str, Any]] = {
    "data x tensor": {"data": 2, "tensor": "auto"},
    "shard x tensor": {"shard": 2, "tensor": 2},
}
CASES = ("clip_norm", "buffers", "optimizer_state")
"""Graphs are compiled for seconds: these say most. All were seen equal over both meshes."""
PARTS = {"data x tensor": [4, 8], "shard x tensor": [4, 4]}
"""What each device has of a weight of 8 x 8."""

PROGRAM = """
import json, sys
import torch, torch_xla
from torch_xla.distributed.spmd import mark_sharding
from fabric import Fabric, read_checkpoint
from fabric.strategies import ModelParallelStrategy
from fabric.testing import cases
from fabric.testing.checks import examine

meshes, chosen, seed = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
some = [case for case in cases() if case.name in chosen]
native = torch_xla._XLAC
seen = {"errors": {}}

def lay_out(model, mesh):
    rows, columns = "tensor", "shard" if mesh.shape()["shard"] > 1 else None
    for parameter in model.parameters():
        if parameter.ndim:
            mark_sharding(parameter, mesh, (rows, columns, *(None,) * parameter.ndim)[: parameter.ndim])

def leave_whole(model, mesh):
    for parameter in model.parameters():
        mark_sharding(parameter, mesh, (None,) * parameter.ndim)

def replace(model, mesh):
    model.weight = torch.nn.Parameter(model.weight.detach().clone())

def fabric_with(function, **degrees):
    strategy = ModelParallelStrategy(parallelize_fn=function, **degrees)
    fabric = Fabric(accelerator="xla", strategy=strategy)
    fabric.launch()
    return fabric

def parts_of(tensor):
    torch_xla.sync(wait=True)  # torch_xla 2.9 gives no parts of what is still computed
    (parts,) = native._get_local_shards([tensor])
    return [list(part.shape) for part, _ in parts]

for name, degrees in meshes.items():
    fabric = fabric_with(lay_out, **degrees)
    found = seen[name] = {"cases": {f.case: [f.result, f.message] for f in examine(fabric, some, seed=seed)}}
    model = torch.nn.Linear(8, 8)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    (batch,) = fabric.setup_dataloaders([torch.ones(4, 8)])
    found["batch"] = native._get_xla_sharding_spec(batch)
    fabric.backward(model(batch).sum())
    fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
    found["parts"] = [parts_of(model.weight), parts_of(optimizer.state[model.weight]["exp_avg"])]
    found["strategy"] = type(fabric.strategy).__name__
    found["world"] = [fabric.world_size, fabric.global_rank]
    fabric.save("saved", {"model": model, "optimizer": optimizer})
    content = read_checkpoint("saved")
    found["saved"] = [[str(t.device), type(t).__name__, list(t.shape)] for t in content["model"].values()]
    fabric.close()

for name, function, degrees in [
    ("tensor", leave_whole, {"data": 2, "tensor": 2}),
    ("shard", leave_whole, {"shard": 4}),
    ("another", replace, {"data": 4}),
]:
    fabric = fabric_with(function, **degrees)
    try:
        fabric.setup(torch.nn.Linear(4, 4))
    except ValueError as error:
        seen["errors"][name] = str(error)
    fabric.close()
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", json.dumps(MESHES), json.dumps(CASES), str(seed)]
    environ = {**os.environ, "CPU_NUM_DEVICES": str(OF_DEVICES)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_marked_model_gives_the_numbers_of_one_process(seen: dict[str, Any], mesh: str, case: str) -> None:
    assert seen[mesh]["cases"][case][0] == "equal", seen[mesh]["cases"][case]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_has_its_part_of_weights_moments_and_batches(seen: dict[str, Any], mesh: str) -> None:
    found = seen[mesh]
    assert found["strategy"] == "XLAModelParallelStrategy"
    assert found["world"] == [1, 0]
    assert found["parts"] == [[PARTS[mesh]] * OF_DEVICES] * 2
    # Two parts, each on the two devices that differ along "tensor".
    assert found["batch"] == "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_saved_are_whole_plain_tensors_of_the_cpu(seen: dict[str, Any], mesh: str) -> None:
    assert seen[mesh]["saved"] == [["cpu", "Tensor", [8, 8]], ["cpu", "Tensor", [8]]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_function_that_ignores_an_axis_or_replaces_parameters_is_an_error(seen: dict[str, Any]) -> None:
    for axis, number in (("tensor", 2), ("shard", 4)):
        words = f"`{axis}={number}` was written, but `parallelize_fn` sharded no parameter along axis '{axis}'. Call "
        assert seen["errors"][axis].startswith(words)
    assert seen["errors"]["another"].startswith("`parallelize_fn` replaced the parameters weight. `mark")


def lay_out(model: Any, mesh: Any) -> None:
    raise AssertionError("nothing was to start")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            ModelParallelStrategy(parallelize_fn=lay_out, context=2),
            r"`XLAModelPar.*, which has no option for `context=2`",
        ),
        (
            ModelParallelStrategy(pipeline=Pipeline(degree=2, num_microbatches=2, split=lay_out, loss_fn=lay_out)),
            r"which has no option for `pipeline=Pipeline\(degree=2",
        ),
        (ModelParallelStrategy(parallelize_fn=lay_out, backend="gloo"), r"which has no option for `backend='gloo'`"),
        (
            ModelParallelStrategy(parallelize_fn=lay_out, data=2, tensor=SIZE),
            rf"makes a mesh of data=2 x shard=1 x tensor={SIZE}: {2 * SIZE} devices, but there are {SIZE}\.",
        ),
        ("model_parallel", r"`strategy='model_parallel'` has no function that parallelises the model"),
    ],
    ids=["context", "pipeline", "backend", "product", "no function"],
)
def test_an_impossible_mesh_is_refused_before_anything_starts(strategy: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fabric(accelerator="xla", strategy=strategy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor": 0}, r"`XLAModelParallelStrategy\(tensor=0\)`: a degree is a number of ranks from 1 on"),
    ],
    ids=str,
)
def test_degrees_that_are_not_numbers_are_an_error_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        XLAModelParallelStrategy(parallelize_fn=lay_out, **options)
