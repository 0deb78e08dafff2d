"""What is written to a slice of a sharded parameter is in the parameter, or raises; numbers that are read are whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from fabric.strategies.tensors.dtensor import whole

RIGHT = """\
w.data[2].zero_()
w[2].zero_()
w[2] = 0
w[2, 3] = 4
w.data[1:3] = 5
w.data[:2].mul_(0.5)
w.data[:4].mul_(w.data[4:])
w.data[1:4][1].fill_(3)
w.data[1:4, 2:][:, 1].fill_(3)
w.data.t()[1].zero_()
w.data.T[:, 2] = 1
w.data[:, 1].zero_()
w.data[..., 1:2].add_(1)
[part.mul_(2) for part in w.data.chunk(3)]
[part.mul_(2) for part in w.data.split([2, 3, 3])]
w.data.diagonal().fill_(7)
w.data.narrow(0, 1, 2).copy_(w.data[3:5])
w.data[1:3].copy_(torch.ones(2, 6))
torch.nn.init.zeros_(w[3])
torch._foreach_mul_([w.data[1], w.data[4]], 3.0)
torch.mul(w.data[1], 2.0, out=w.data[1])
row = w.data[2]; w.data.add_(1); row.mul_(2); w.data[0].copy_(row)
row = w.detach()[2].clone(); row.zero_()
row = w.data[2] + 1; row.zero_()
w.data[1], w.data[2] = w.data[2].clone(), w.data[1].clone()
w.data[1].unsqueeze(0).zero_()
w.data[1].detach().zero_()
w.data.select(0, 2).clamp_(max=11)
w.data.fill_(int((w.data > 1.5).sum()))
w.data.fill_(w.data.max().item())
(w.data > 1.9).any() and w.data.zero_()""".splitlines()
RAISES = {
    "torch.nn.init.normal_(w.data[3])": "`aten::normal_` on a slice of a parameter that is sharded (a DTensor)",
    "w.data.copy_(torch.ones(8, 6))": "write `fabric.load_raw(path, model)`, or load a state dict before",
    "torch.ones(8, 6).copy_(w.data)": "write `target.load_state_dict(fabric.state_dict(model, all_ranks=True))` on all",
    "torch._foreach_zero_([w.data[1], w.data.t()[:, 1]])": "and of its transpose at once",
}


def write_to_all(fabric: Fabric) -> dict[str, str]:
    """What becomes of each program: right, wrong, or the sentence that it raises."""
    found = {}
    for program in (*RIGHT, *RAISES):
        layers = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
        for each in layers:
            nn.init.uniform_(each.weight, 1, 2, generator=torch.Generator().manual_seed(1))
        plain, prepared = layers[0], fabric.setup(layers[1])
        with torch.no_grad():
            exec(program, {"w": plain.weight, "torch": torch})
            try:
                exec(program, {"w": prepared.weight, "torch": torch})
            except RuntimeError as error:
                found[program] = str(error)
                continue
        now = whole(prepared.weight)
        found[program] = "right" if torch.equal(now, plain.weight) else f"wrong: {now}"
        prepared(torch.eye(6))  # raises, if the change is one that `fully_shard` would ignore
    return found


def in_columns(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, mesh["tensor"], ColwiseParallel(use_local_output=True))
    if mesh["shard"].size() > 1:
        fully_shard(model, mesh=mesh["shard"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (FSDPStrategy(), 3),
        (FSDPStrategy(device_mesh=(2, 2)), 4),
        (ModelParallelStrategy(parallelize_fn=in_columns, tensor=2), 2),
        (ModelParallelStrategy(parallelize_fn=in_columns, shard=2, tensor=2), 4),
    ],
    ids=["fsdp", "hsdp", "tensor", "shard-tensor"],
)
def test_writes_to_slices_arrive_or_raise(strategy: Strategy, size: int) -> None:
    found = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, launcher="forkserver").launch(write_to_all)
    assert found is not None
    assert {program: found[program] for program in RIGHT} == dict.fromkeys(RIGHT, "right")
    for program, sentence in RAISES.items():
        assert sentence in found[program]
