"""What a model, an optimizer, a loader and a checkpoint become over XLA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from cpu_replicas import launch_replicas
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric, read_checkpoint
from fabric.strategies.xla.replicas import XLAStrategy

SIZE = int(os.environ["CPU_NUM_DEVICES"])


class Tied(nn.Module):
    """Two layers of one weight, a buffer twice, and something that the user noted on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight
        self.register_buffer("offset", torch.ones(5))
        self.out.weight.note = "mine"  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens)) + self.offset


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="xla", strategy="single_xla", devices=1) as fabric:
        yield fabric


def test_parameters_stay_the_objects_they_are_and_optimizers_follow(fabric: Fabric) -> None:
    model = Tied()
    weight, bias = model.out.weight, model.out.bias
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer.step()
    before = weight.detach().clone()
    model, optimizer = fabric.setup(model, optimizer)
    assert model.embed.weight is model.out.weight is weight
    assert optimizer.param_groups[0]["params"] == [weight, bias]
    assert weight.note == "mine"
    places = [weight, weight.grad, model.offset, optimizer.state[weight]["momentum_buffer"]]
    assert {tensor.device for tensor in places} == {fabric.device}
    torch.testing.assert_close(weight.detach().cpu(), before)
    optimizer.step()
    torch.testing.assert_close(weight.detach().cpu(), before - 0.5 * 1.9)


def test_a_step_runs_the_recorded_graph(fabric: Fabric) -> None:
    import torch_xla.debug.metrics as metrics

    model, optimizer = fabric.setup(*_linear())
    fabric.backward(model(torch.ones(2, 3, device=fabric.device)).sum())
    marks = metrics.counter_value("MarkStep") or 0
    optimizer.step()
    assert metrics.counter_value("MarkStep") == marks + 1
    fabric.close()
    optimizer.step()
    assert metrics.counter_value("MarkStep") == marks + 1, "a hook outlived the fabric"


class Summed(nn.Module):
    """Its gradient is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * x


def test_the_gradient_of_a_sum_is_accumulated_and_clipped_also_where_it_was_frozen_at_setup(fabric: Fabric) -> None:
    model = Summed().requires_grad_(False)
    bare = nn.Parameter(torch.ones(2, device=fabric.device))
    model, optimizer = fabric.setup(model, torch.optim.SGD([*model.parameters(), bare], lr=1.0))
    model.requires_grad_(True)
    for _ in range(2):
        fabric.backward(model(1.0) + bare.sum())
    assert model.weight.grad is not None
    assert bare.grad is not None
    assert (model.weight.grad.tolist(), bare.grad.tolist()) == ([2.0] * 4, [2.0] * 2)
    fabric.clip_gradients(model, optimizer, clip_val=0.5)
    assert (model.weight.grad.tolist(), bare.grad.tolist()) == ([0.5] * 4, [0.5] * 2)


def test_a_model_that_was_loaded_from_another_is_trained_apart_from_it(fabric: Fabric) -> None:
    model, other = fabric.setup_module(nn.Linear(3, 2)), nn.Linear(3, 2)
    other, optimizer = fabric.setup(other, torch.optim.SGD(other.parameters(), lr=1.0))
    other.load_state_dict(model.state_dict())
    torch_xla.sync()
    before = model.weight.tolist()
    fabric.backward(other(torch.ones(1, 3, device=fabric.device)).sum())
    optimizer.step()
    assert model.weight.tolist() == before
    torch.testing.assert_close(other.weight.detach().cpu(), torch.tensor(before) - 1)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_a_nan_gradient_raises_for_a_norm_of_any_order(fabric: Fabric, norm_type: float) -> None:
    module = nn.Linear(3, 2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
    fabric.backward(model(torch.tensor([[1.0, float("nan"), 2.0]], device=fabric.device)).sum())
    with pytest.raises(RuntimeError, match=r"is nan|non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=norm_type)


def test_a_checkpoint_has_plain_tensors_of_the_cpu_and_loads_back(fabric: Fabric, tmp_path: Path) -> None:
    model, optimizer = fabric.setup(*_linear())
    fabric.backward(model(torch.ones(2, 3, device=fabric.device)).sum())
    optimizer.step()
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    content = read_checkpoint(tmp_path / "saved")
    moment = content["optimizer"]["state"][0]["momentum_buffer"]
    assert {tensor.device.type for tensor in (*content["model"].values(), moment)} == {"cpu"}
    torch.testing.assert_close(moment, torch.full((2, 3), 2.0))
    saved = content["model"]["weight"]
    with torch.no_grad():
        model.weight.zero_()
    fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    torch.testing.assert_close(model.weight.detach().cpu(), saved)
    assert model.weight.device == fabric.device


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise KeyError("the third sample")
        return index


def test_an_error_of_the_dataset_is_raised_in_the_loop(fabric: Fabric) -> None:
    batches = iter(fabric.setup_dataloaders(DataLoader(Failing())))
    assert [next(batches).item(), next(batches).item()] == [0, 1]
    with pytest.raises(KeyError, match="the third sample"):
        next(batches)


def test_batches_come_in_the_containers_they_were_made_in(fabric: Fabric) -> None:
    batch = next(iter(fabric.setup_dataloaders([{"x": (torch.ones(2), "word"), "y": [3]}])))
    assert type(batch["x"]) is tuple
    assert batch["x"][0].device == fabric.device
    assert (batch["x"][1], batch["y"]) == ("word", [3])


def test_a_seed_set_before_launching_seeds_the_device() -> None:
    drawn = []
    for _ in range(2):
        Fabric.seed_everything(7)
        with Fabric(accelerator="xla", strategy="single_xla", devices=1) as fabric:
            drawn.append(torch.rand(3, device=fabric.device).tolist())
    assert drawn[0] == drawn[1]
    with Fabric(accelerator="xla", strategy="single_xla", devices=1) as fabric:
        Fabric.seed_everything(7)
        assert torch.rand(3, device=fabric.device).tolist() == drawn[0]


def average_by_rank(fabric: Fabric) -> Any:
    """Gradients, on every rank, where the ranks' models and data differ. Numbers of a rank come as data: as constants
    they would be in its graph, and every replica records the same."""
    mine = fabric.to_device(torch.full((1, 3), 1.0 + fabric.global_rank))
    torch.manual_seed(fabric.global_rank)
    model, optimizer = fabric.setup(*_linear())
    before = model.weight.detach().cpu().tolist()
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.ones(1, 3, device=fabric.device)).sum())
    fabric.backward(model(mine).sum())
    if fabric.is_global_zero:
        assert model.weight.grad.sum().item()  # one rank alone may read what was averaged
    fabric.clip_gradients(model, optimizer, clip_val=100.0)
    gradient = model.weight.grad.cpu().tolist()
    optimizer.step()
    optimizer.zero_grad()
    fabric.backward((model(torch.ones(1, 3, device=fabric.device)) * mine[:, :2]).sum())
    return before, gradient, model.weight.grad.cpu().tolist()


@pytest.mark.slow
def test_weights_are_rank_zeros_and_gradients_the_mean_after_accumulation_and_clipping() -> None:
    fabric = Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=SIZE)
    results = launch_replicas(fabric, average_by_rank)
    before, gradient, _ = results[0]
    assert gradient == [[1 + (1 + SIZE) / 2] * 3] * 2
    assert all(result == (before, gradient, [[(1 + SIZE) / 2] * 3] * 2) for result in results)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"strategy": "fsdp"},
            r"`strategy='fsdp'` marks none\. Write `strategy='xla'`, or 'single_xla' for one device",
        ),
        ({"strategy": "single_device"}, r"`strategy='single_device'` marks none"),
        ({"strategy": "ddp"}, r"`strategy='ddp'` marks none\. Write `strategy='xla'`, or 'single_xla' for one device"),
        (
            {"strategy": "xla", "devices": SIZE},
            rf"`strategy='xla'` with {SIZE} replicas on PJRT_DEVICE=CPU: torch_xla 2\.9 ",
        ),
        ({"strategy": "single_xla", "devices": 2}, r"uses one device, but `devices=2` and `num_nodes=1` make 2"),
        ({"strategy": "xla_fsdp", "num_nodes": 2}, "`num_nodes=2`"),
        (
            {"strategy": "xla", "launcher": "spawn"},
            r"starts its processes by 'xla', but `launcher='spawn'` was written\. Choose one of the two\.$",
        ),
        ({"strategy": "xla", "accelerator": "cpu"}, r"runs on devices of XLA, but the accelerator is 'cpu'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_an_impossible_configuration_is_refused_before_anything_starts(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Fabric(**{"accelerator": "xla", **words})


def set_up_sync_batch_norm(fabric: Fabric) -> None:
    fabric.setup(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"has layers of `SyncBatchNorm`\. Torch's has no messages over XLA"):
        fabric.setup(nn.Sequential(nn.SyncBatchNorm(3)))


@pytest.mark.slow
def test_batch_norm_over_all_replicas_is_refused_where_it_would_be_of_each() -> None:
    launch_replicas(
        Fabric(accelerator="xla", strategy=XLAStrategy(cpu_replicas=True), devices=SIZE), set_up_sync_batch_norm
    )


def test_one_device_of_several_is_not_what_replicas_run_on() -> None:
    if SIZE < 3:
        pytest.skip("needs three devices")
    with pytest.raises(ValueError, match=rf"`devices=2` with `strategy='xla'`, but PJRT has {SIZE} devices here"):
        Fabric(accelerator="xla", strategy="xla", devices=2)


def _linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_the_monitor_raises_where_to_read_a_number_would_end_the_graph(fabric: Fabric) -> None:
    with pytest.raises(
        ValueError, match=r"`fabric.monitor\(\)` reads numbers in a step, and on `xla` a step is recorded"
    ):
        fabric.monitor(show=False)
