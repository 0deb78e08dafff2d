"""Data parallel over Horovod: the numbers of one process, and gradients that are averaged whoever runs backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import Delay, train
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric, WorkerError
from fabric.strategies import HorovodStrategy
from fabric.testing import cases, survey

pytestmark = pytest.mark.slow

HALVES = ("sgd", "adamw", "accumulate_and_clip", "unused")
"""In half precision, and alone, the cases that differ in what is averaged."""
OF_FOUR = ("sgd", "accumulate_and_clip", "repeated_backward", "weights", "uneven_stream", "collective")
"""On four ranks, which poll for each other on two cores, those that depend on how many there are."""
REST_OF_FOUR = ("adamw", "unused", "buffers", "uneven")
OF_TWO = (
    *OF_FOUR, *REST_OF_FOUR, "groups", "scalars", "tied", "later_optimizers", "several_optimizers", "joint_optimizer",
    "bare_parameters", "compile", "optimizer_state", "gather_gradients",
)  # fmt: skip
"""On two, one case for each way in which gradients come to be averaged, or a rank to wait for another."""
REST_OF_TWO = tuple(case.name for case in cases() if case.name not in OF_TWO)
ROWS = [
    pytest.param(2, "32-true", OF_TWO, id="2-32-true"),
    pytest.param(2, "32-true", REST_OF_TWO, id="2-32-true-the_rest"),
    pytest.param(4, "64-true", OF_FOUR, id="4-64-true"),
    pytest.param(4, "64-true", REST_OF_FOUR, id="4-64-true-the_rest"),
    *(
        pytest.param(size, precision, HALVES, id=f"{size}-{precision}")
        for size, precision in ((1, "32-true"), (2, "bf16-true"), (2, "16-mixed"))
    ),
]
"""`make test-horovod` leaves the rest to `make check`: the other cases do the same to gradients and ranks."""


@pytest.mark.parametrize(("size", "precision", "names"), ROWS)
def test_the_numbers_are_those_of_one_process(size: int, precision: str, names: tuple[str, ...]) -> None:
    some = [case for case in cases() if case.name in names]
    findings = survey(HorovodStrategy(timeout_seconds=60), some, devices=size, precision=precision)  # type: ignore[arg-type]
    assert len(findings) == len(names) > 3
    of_all = "equal" if size == 1 else "raised"  # Horovod has no `send` and `recv`
    expected = {case.name: of_all if case.name == "collective" else "equal" for case in some}
    assert not [finding for finding in findings if finding.result != expected[finding.case]]


def ranks(size: int = 2, **options: Any) -> Fabric:
    return Fabric(accelerator="cpu", strategy=HorovodStrategy(**{"timeout_seconds": 20, **options}), devices=size)


class Net(nn.Module):
    """Two layers, of which the second takes part only where it is asked to, and a buffer that adds up what it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.extra = nn.Linear(2, 1), nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, use_extra: bool = False) -> Tensor:
        self.seen += x.sum()  # type: ignore[operator]
        return self.linear(x) + self.extra(x) if use_extra else self.linear(x)


class Fragile(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


def mine(fabric: Fabric) -> Tensor:
    return torch.full((1, 2), float(fabric.global_rank + 1))


def gradients(fabric: Fabric) -> dict[str, Any]:
    """Of `sum(linear(x))` the gradient is x: 1 on rank 0, 2 on rank 1, and 1.5 once it is averaged."""
    found: dict[str, Any] = {}
    x = mine(fabric)

    def keep(name: str, net: Net) -> None:
        one, other = net.linear.weight.grad, net.extra.weight.grad
        found[name] = [None if grad is None else grad[0].tolist() for grad in (one, other)]
        net.zero_grad()

    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    prepared, same = fabric.setup(net, optimizer)
    found["own"] = prepared is net and same is optimizer
    fabric.backward(net(x).sum())
    keep("fabric.backward", net)
    net(x).sum().backward()
    keep("loss.backward", net)
    fabric.backward(net(x, use_extra=fabric.global_rank == 0).sum())
    keep("used on rank 0 alone", net)
    with fabric.no_backward_sync(net):
        fabric.backward(net(x, use_extra=True).sum())
        found["unsynced"] = net.linear.weight.grad[0].tolist()  # type: ignore[index]
    fabric.backward(net(x).sum())
    keep("unsynced, then synced", net)
    fabric.backward(net(x).sum())
    fabric.backward(net(x).sum())
    keep("synced twice", net)
    with pytest.raises(ArithmeticError):
        fabric.backward(net.linear(Fragile.apply(net.linear(x).expand(1, 2))).sum())
    net.zero_grad()
    fabric.backward(net(x).sum())
    keep("after a backward that raised", net)
    found["seen"] = fabric.all_gather(net.seen)[:, 0].tolist()
    frozen = fabric.setup_module(Net().requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    frozen.requires_grad_()
    fabric.backward(frozen(x).sum())
    keep("frozen when it was set up", frozen)
    other = fabric.setup_module(Net())
    fabric.backward((net(x) * other.linear(x).detach()).sum() + other(x).sum())
    keep("two models", other)
    fabric.close()
    net.zero_grad()
    net(x).sum().backward()
    found["closed"] = net.linear.weight.grad[0].tolist()  # type: ignore[index]
    return found


def test_every_backward_averages_each_gradient_that_some_rank_has() -> None:
    found = ranks().launch(gradients)
    assert found is not None
    seen = found.pop("seen")
    assert seen[0] == seen[1] > 0
    assert found == {
        "own": True,
        "fabric.backward": [[1.5, 1.5], None],
        "loss.backward": [[1.5, 1.5], None],
        "used on rank 0 alone": [[1.5, 1.5], [0.5, 0.5]],
        "unsynced": [1.0, 1.0],
        "unsynced, then synced": [[3.0, 3.0], [1.5, 1.5]],
        "synced twice": [[3.0, 3.0], None],
        "after a backward that raised": [[1.5, 1.5], None],
        "frozen when it was set up": [[1.5, 1.5], None],
        "two models": [[1.5, 1.5], None],
        "closed": [1.0, 1.0],
    }


def make_models_that_differ(fabric: Fabric) -> None:
    fabric.setup(nn.Linear(2 + fabric.global_rank, 6 // (2 + fabric.global_rank)))


def test_models_that_differ_between_ranks_are_an_error_that_shows_both() -> None:
    with pytest.raises(WorkerError) as raised:
        ranks().launch(make_models_that_differ)
    assert "did not make the same call" in str(raised.value)
    for rank, shape in enumerate(("(3, 2)", "(2, 3)")):
        assert f"rank {rank}: setup of `Linear`, at " in str(raised.value)
        assert f" in make_models_that_differ\n      weight: float32 {shape}" in str(raised.value)


def train_different_models(fabric: Fabric) -> None:
    models = [fabric.setup_module(nn.Linear(2, 2)) for _ in range(2)]
    fabric.backward(models[fabric.global_rank](torch.ones(1, 2)).sum())


def test_ranks_whose_losses_are_of_different_models_raise() -> None:
    words = r"through `Linear`, number (1|2) of the models set up; the ranks' numbers go from 1 to 2"
    with pytest.raises(WorkerError, match=words):
        ranks().launch(train_different_models)


def keep_buffers(fabric: Fabric) -> list[float]:
    net = fabric.setup_module(Net())
    fabric.backward(net(mine(fabric)).sum())
    values: list[float] = fabric.all_gather(net.seen)[:, 0].tolist()
    return values


def test_buffers_are_broadcast_from_rank_zero_by_default() -> None:
    assert ranks().launch(keep_buffers) == [2.0, 2.0]
    assert ranks(broadcast_buffers=False).launch(keep_buffers) == [2.0, 4.0]


def add_a_layer(fabric: Fabric) -> None:
    """It is refused in forward, and where the loss does not come from forward."""
    net = fabric.setup_module(nn.Sequential(nn.Linear(2, 1)))
    fabric.backward(net(mine(fabric)).sum())
    net.append(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"Parameters were added to `Sequential` after.*: '1.weight', '1.bias'\."):
        net(mine(fabric))
    with pytest.raises(RuntimeError, match=r"Parameters were added to `Sequential` after"):
        fabric.backward(net[1](torch.ones(1, 1)).sum())


def test_a_layer_that_is_added_after_setup_is_refused() -> None:
    ranks().launch(add_a_layer)


def use_sparse(fabric: Fabric) -> None:
    """On one rank, where another has a dense gradient, and on both. They are told together, and go on."""
    net = fabric.setup_module(nn.Embedding(5, 2, sparse=True))
    for is_dense_here in (fabric.global_rank == 1, False):
        loss = net.weight.sum() if is_dense_here else net(torch.tensor([fabric.global_rank])).sum()
        net.zero_grad()
        with pytest.raises(RuntimeError, match=r"A gradient of shape \(5, 2\) is sparse.*pass `strategy='ddp'`"):
            fabric.backward(loss)


def test_a_sparse_gradient_of_any_rank_is_refused_on_all() -> None:
    ranks().launch(use_sparse)


def train_with_one_late_rank(fabric: Fabric, delay: Delay, folder: str) -> None:
    train(fabric, delay, Path(folder), window_steps=6, show=False)


@pytest.mark.parametrize("where", ["data", "backward"])
def test_the_monitor_names_nobody_for_waits_that_are_not_recorded(where: str, tmp_path: Path) -> None:
    ranks(3, timeout_seconds=60).launch(train_with_one_late_rank, Delay(where, seconds=0.12), str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["kind"] == "window"]
    assert [window["slow"] for window in windows] == [None, None]
    assert windows[-1]["ranks"][1][f"{where}_seconds"] > 0.1
