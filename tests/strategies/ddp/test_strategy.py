"""Data parallel over real ranks: what is averaged is averaged, what is not raises."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR, only_on_cpu
from torch import nn
from torch.optim import SGD

from fabric import Fabric, WorkerError
from fabric.strategies import DDPStrategy
from fabric.strategies.capabilities import Target
from fabric.testing import cases, check


def ranks(size: int = 2, **options: Any) -> Fabric:
    return Fabric(accelerator=ACCELERATOR, strategy=DDPStrategy(**options), devices=size)


class Net(nn.Module):
    """A linear layer, a second method that computes a loss, and a part that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(2, 1)
        self.extra = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        return self.linear(x) + self.extra(x) if use_extra else self.linear(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def mine(fabric: Fabric) -> torch.Tensor:
    """A batch that differs between ranks."""
    return torch.full((2, 2), float(fabric.global_rank + 1), device=ACCELERATOR)


def differ(fabric: Fabric, tensor: torch.Tensor | None) -> bool:
    """Whether a tensor differs between the ranks."""
    assert tensor is not None
    gathered = fabric.all_gather(tensor)
    return not torch.equal(gathered, gathered[:1].expand_as(gathered))


def gradients_after(fabric: Fabric, how: str) -> bool | str:
    net = fabric.setup(Net())
    x = mine(fabric)
    if how == "forward":
        fabric.backward(net(x).sum())
    elif how == "marked":
        net.mark_forward_method("loss")
        fabric.backward(net.loss(x))
    elif how == "unmarked":
        try:
            fabric.backward(nn.functional.linear(x, net.linear.weight).sum())
        except RuntimeError as error:
            return str(error)
    elif how == "twice":
        loss = net(x).sum()
        fabric.backward(loss, retain_graph=True)
        try:
            fabric.backward(loss)
        except RuntimeError as error:
            return str(error)
    elif how == "unsynced":
        with fabric.no_backward_sync(net):
            fabric.backward(net(x).sum())
    elif how == "unsynced, then synced":
        with fabric.no_backward_sync(net):
            fabric.backward(net(x).sum())
        with fabric.no_backward_sync(net, enabled=False):
            fabric.backward(net(x).sum())
    elif how == "forward inside, backward outside":
        with fabric.no_backward_sync(net):
            loss = net(x).sum()
        try:
            fabric.backward(loss)
        except RuntimeError as error:
            return str(error)
    elif how == "penalty":
        x.requires_grad_()
        score = net(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        fabric.backward(score.sum() + slope.square().sum())
    return differ(fabric, net.linear.weight.grad)


HOWS = {
    "forward": False,
    "marked": False,
    "unsynced": True,
    "unsynced, then synced": False,
    "penalty": False,
    "unmarked": "not averaged",
    "twice": "not averaged",
    "forward inside, backward outside": "not averaged",
}


def all_hows(fabric: Fabric) -> dict[str, bool | str]:
    return {how: gradients_after(fabric, how) for how in HOWS}


@pytest.mark.slow
def test_gradients_are_averaged_or_the_backward_raises() -> None:
    found = ranks().launch(all_hows)
    assert found is not None
    for how, expected in HOWS.items():
        if isinstance(expected, str):
            assert expected in str(found[how]), how
        else:
            assert found[how] is expected, how


def many_things(fabric: Fabric) -> dict[str, Any]:
    found: dict[str, Any] = {}
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    found["own objects"] = fabric.setup(net, optimizer) == (net, optimizer)
    found["names"] = list(net.state_dict())
    found["copy"] = "forward" not in vars(copy.deepcopy(net).linear)
    found["pickle"] = type(pickle.loads(pickle.dumps(net))).__name__
    # Evaluation on rank 0 alone talks to nobody, BatchNorm or not.
    norm = fabric.setup(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    fabric.backward(norm(mine(fabric) * torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=ACCELERATOR)).square().sum())
    found["buffers differ"] = differ(fabric, norm[1].running_mean)
    norm.eval()
    if fabric.is_global_zero:
        with torch.no_grad():
            norm(torch.ones(2, 2, device=ACCELERATOR))
    # A frozen model has no gradients to average.
    frozen = fabric.setup(nn.Linear(2, 2).requires_grad_(False))
    found["frozen"] = frozen(torch.ones(1, 2, device=ACCELERATOR)).shape
    # Weights start as those of rank 0.
    torch.manual_seed(fabric.global_rank)
    other = fabric.setup(nn.Linear(3, 3))
    found["weights differ"] = differ(fabric, other.weight.detach())
    found["loss"] = fabric.all_gather(torch.tensor(1.0), sync_grads=True).shape
    compiled = fabric.setup(torch.compile(Net(), backend="aot_eager"))
    fabric.backward(compiled(mine(fabric)).sum())
    found["compiled before"] = differ(fabric, compiled.linear.weight.grad)
    after = fabric.setup(Net())
    fabric.backward(torch.compile(after, backend="aot_eager")(mine(fabric)).sum())
    found["compiled after"] = differ(fabric, after.linear.weight.grad)
    return found


@pytest.mark.slow
def test_models_remain_the_users_objects_and_ranks_stay_equal() -> None:
    found = ranks().launch(many_things)
    assert found is not None
    assert found == {
        "own objects": True,
        "names": ["linear.weight", "linear.bias", "extra.weight", "extra.bias"],
        "copy": True,
        "pickle": "Net",
        "buffers differ": False,
        "frozen": (1, 2),
        "weights differ": False,
        "loss": (2,),
        "compiled before": False,
        "compiled after": False,
    }


def unused(fabric: Fabric) -> None:
    net = fabric.setup(Net())
    for _ in range(2):
        fabric.backward(net(mine(fabric), use_extra=False).sum())


@pytest.mark.slow
def test_a_parameter_without_a_gradient_raises_unless_find_unused_parameters_is_set() -> None:
    with pytest.raises(WorkerError, match="find_unused_parameters=True"):
        ranks().launch(unused)
    ranks(find_unused_parameters=True).launch(unused)


class Hiding(Net):
    def forward(self, *args: Any) -> Any:
        return iter([super().forward(*args)])


def hidden(fabric: Fabric) -> None:
    fabric.backward(next(fabric.setup(Hiding())(mine(fabric))).sum())


@pytest.mark.slow
def test_an_output_that_the_search_for_unused_parameters_cannot_see_raises() -> None:
    with pytest.raises(WorkerError, match="Expected to mark a variable ready only once"):
        ranks(find_unused_parameters=True).launch(hidden)


def unsynced_after_a_discarded_forward(fabric: Fabric) -> None:
    net = fabric.setup(nn.Linear(2, 2))
    net(mine(fabric))  # discarded
    for _ in range(2):
        with fabric.no_backward_sync(net):
            fabric.backward(net(mine(fabric)).sum())
    fabric.backward(net(mine(fabric)).sum())
    torch.testing.assert_close(net.bias.grad, torch.full((2,), 6.0, device=ACCELERATOR))


@pytest.mark.slow
def test_a_forward_whose_output_is_discarded_changes_no_gradient() -> None:
    ranks().launch(unsynced_after_a_discarded_forward)


def two_models(fabric: Fabric) -> list[bool]:
    """A generator and a discriminator, each stepping in its turn."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    generator, of_generator = fabric.setup(generator, SGD(generator.parameters(), lr=0.1))
    discriminator, of_discriminator = fabric.setup(discriminator, SGD(discriminator.parameters(), lr=0.1))
    for _ in range(3):
        noise = mine(fabric)
        of_discriminator.zero_grad()
        fabric.backward(discriminator(generator(noise).detach()).sum() + discriminator(noise).square().sum())
        of_discriminator.step()
        of_generator.zero_grad()
        fabric.backward(-discriminator(generator(noise)).sum())
        of_generator.step()
    return [differ(fabric, p.detach()) for p in (*generator.parameters(), *discriminator.parameters())]


@pytest.mark.slow
def test_two_models_and_optimizers_stay_equal_on_all_ranks() -> None:
    assert ranks().launch(two_models) == [False] * 4


def sequence_of_fabrics(fabric: Fabric) -> list[Any]:
    """Inside a rank: fabrics one after another, and one that believes in another world."""
    found: list[Any] = []
    fabric.close()
    for _ in range(3):
        with Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=2) as again:
            again.launch()
            found.append(again.all_reduce(torch.tensor(float(again.global_rank)), reduce_op="sum").item())
    try:
        Fabric(accelerator=ACCELERATOR, strategy="ddp", devices=3)
    except ValueError as error:
        found.append(str(error))
    found.append((fabric.global_rank, fabric.world_size))  # closed, and still rank 0
    fabric.launch()
    found.append(fabric.all_reduce(torch.tensor(1.0), reduce_op="sum").item())
    return found


@pytest.mark.slow
def test_fabrics_one_after_another_in_a_rank_are_independent_and_know_the_real_world() -> None:
    found = ranks().launch(sequence_of_fabrics)
    assert found is not None
    assert found[:3] == [1.0, 1.0, 1.0]
    assert "3" in found[3]
    assert "2" in found[3]
    assert found[4:] == [(0, 2), 2.0]


def test_mps_in_several_processes_is_refused() -> None:
    from fabric.strategies.accelerators import TorchAccelerator

    sentence = DDPStrategy().refuse(Target(accelerator=TorchAccelerator("mps"), num_devices=2))
    assert sentence is not None
    assert "Pass `accelerator='cpu'`, or `devices=1`" in sentence
    assert DDPStrategy().refuse(Target(accelerator=TorchAccelerator("mps"))) is None


def under_detail(fabric: Fabric) -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as the variable sets it when torch is imported
    with pytest.raises(RuntimeError) as raised:
        fabric.setup(Net())
    return str(raised.value)


@only_on_cpu("with NCCL torch does not crash")
def test_a_debug_level_with_which_torch_crashes_is_refused() -> None:
    assert "Write INFO. `Fabric(sanitize='always')` compares" in ranks().launch(under_detail)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "repeated_backward", "weights", "accumulate", "discard", "policy"])
def test_a_static_graph_trains_as_one_process_and_refuses_to_accumulate(name: str) -> None:
    (case,) = (each for each in cases() if str(each) == name)
    check(DDPStrategy(static_graph=True), case, devices=2)
