"""`Fabric(sanitize=...)`: in the steps that are watched, ranks compare what they should have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric, SanitizerError, WorkerError
from fabric.checks.sanitizer import WatchedSteps
from fabric.strategies import FSDPStrategy, Strategy
from fabric.strategies.tensors.dtensor import local_part


def test_which_steps_are_watched() -> None:
    steps = range(1, 35)
    assert [each for each in steps if each in WatchedSteps("start")] == [1, 2, 3, 4, 8, 16, 32]
    assert [each for each in steps if each in WatchedSteps(10)] == [1, 2, 3, 4, 8, 10, 16, 20, 30, 32]
    assert all(each in WatchedSteps("always") for each in steps)
    assert WatchedSteps("start").after(4) == 8
    assert WatchedSteps(10).after(16) == 20


def part(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach())


def differences(fabric: Fabric) -> list[str]:
    """What is raised where the last rank has another weight, and where it has another optimizer state."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0))
    parameters = list(model.parameters())

    def step() -> None:
        fabric.backward(model(torch.ones(2, 4) * fabric.global_rank).sum())
        optimizer.step()
        optimizer.zero_grad()

    sentences = []
    for tensor_of in (lambda: part(parameters[2]), lambda: part(optimizer.state[parameters[0]]["exp_avg"])):
        step(), step()
        own = tensor_of().clone()
        if fabric.global_rank == fabric.world_size - 1:
            tensor_of().data += 1
        try:
            step()
        except SanitizerError as error:
            sentences.append(str(error))
        dist.barrier()
        tensor_of().data.copy_(own)
        optimizer.zero_grad()
    return sentences


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), (FSDPStrategy(device_mesh=(2, 2)), 4)], ids=["ddp", "hsdp"])
def test_the_first_difference_is_named_with_the_ranks_and_the_step_since_when(
    strategy: str | Strategy, size: int
) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, sanitize="always")
    weight, state = fabric.launch(differences)
    ranks = {2: "rank 1 differs from that on rank 0", 4: "rank 3 differs from that on rank 1"}[size]
    assert f"After step 2 of `AdamW`, `1.weight` on {ranks}. They were equal after step 1 of `AdamW`." in weight
    assert f"After step 4 of `AdamW`, `exp_avg` of `0.weight` in `AdamW` on {ranks}." in state


def drift_at_the_end(fabric: Fabric, num_steps: int) -> None:
    net = nn.Linear(4, 2)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    for _ in range(num_steps):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    model.bias.data += fabric.global_rank


@pytest.mark.slow
def test_a_watched_step_is_compared_in_close_if_no_backward_follows_and_others_are_not() -> None:
    with pytest.raises(WorkerError, match=r"After step 2 of `SGD`, `bias` on rank 1 differs from that on rank 0\. "):
        Fabric(accelerator=ACCELERATOR, devices=2).launch(drift_at_the_end, 2)
    with pytest.raises(WorkerError, match=r"At `fabric\.close\(\)`, `bias` on rank 1 differs from that on rank 0\. "):
        Fabric(accelerator=ACCELERATOR, devices=2).launch(drift_at_the_end, 0)
    Fabric(accelerator=ACCELERATOR, devices=2).launch(drift_at_the_end, 6)
    Fabric(accelerator=ACCELERATOR, devices=2, sanitize=False).launch(drift_at_the_end, 2)


def train(fabric: Fabric, after: Callable[[Fabric, int, SGD, ReduceLROnPlateau], bool]) -> None:
    """`after`: called after each backward; whether to step."""
    model, optimizer = fabric.setup(*make())
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for step in range(12):
        fabric.backward(model(torch.full((2, 4), fabric.global_rank + 1.0)).sum())
        if after(fabric, step, optimizer, scheduler):
            optimizer.step()
            optimizer.zero_grad()


def make() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, SGD(model.parameters(), lr=0.1)


def by_the_loss_of_each_rank(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    scheduler.step(float(step * (2 * fabric.global_rank - 1)))  # falls on rank 0, and rises on rank 1
    return True


def by_the_loss_of_all_ranks(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    scheduler.step(float(fabric.all_reduce(float(step * fabric.global_rank))))
    return step % 3 == 2


def left_out_on_rank_one(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    return not (fabric.global_rank == 1 and step == 5)


@torch.no_grad()
def noise_of_each_rank(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return True


def loaded_on_rank_zero(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    if fabric.global_rank == 0 and step == 1:
        optimizer.param_groups[0]["params"][1].data.fill_(0.5)
    return step != 1


def stepped_on_rank_zero(fabric: Fabric, step: int, optimizer: SGD, scheduler: ReduceLROnPlateau) -> bool:
    return fabric.global_rank == 0 or step == 0


PROGRAMS: list[tuple[Any, str]] = [
    (by_the_loss_of_all_ranks, ""),
    (
        by_the_loss_of_each_rank,
        "After step 2 of `SGD`, `lr` of parameter group 0 of `SGD` on rank 1 differs from that on rank 0 (0.01 on rank "
        "1, 0.1 on rank 0). They were equal after step 1 of `SGD`",
    ),
    (
        loaded_on_rank_zero,
        "In a backward, `bias` on rank 1 differs from that on rank 0. They were equal after step 1 of",
    ),
    (
        left_out_on_rank_one,
        "the number of steps of `SGD` on rank 1 differs from that on rank 0 (6 on rank 1, 7 on rank 0). They were "
        "equal after step 4 of `SGD`.",
    ),
    (noise_of_each_rank, "After step 1 of `SGD`, `weight` on rank 1 differs from that on rank 0."),
    (
        stepped_on_rank_zero,
        "the number of steps of `SGD` on rank 1 differs from that on rank 0 (1 on rank 1, 2 on rank 0). They were "
        "equal after step 1 of `SGD`. Call `fabric.backward`, and step each optimizer, on all ranks or on none",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed_stage_1", marks=pytest.mark.thorough)])
def test_what_one_rank_does_to_its_optimizer_or_weights_raises_and_what_all_do_does_not(strategy: str) -> None:
    for program, words in PROGRAMS[: {"ddp": None, "fsdp": 2}.get(strategy, 3)]:
        fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
        with pytest.raises(WorkerError, match=re.escape(words)) if words else nullcontext():
            fabric.launch(train, program)


class ActNorm(nn.Module):
    """Takes its weights from its first batch, as flows do: under data parallelism, from that of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.has_weights = nn.Parameter(torch.zeros(4)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_weights:
            self.shift.data.copy_(-x.mean(0))
            self.has_weights = True
        return x + self.shift


def train_act_norm(fabric: Fabric) -> None:
    model = nn.Sequential(nn.Linear(4, 4), ActNorm())
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.randn(2, 4) + fabric.global_rank).square().sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded"])
def test_weights_that_a_rank_takes_from_its_first_batch_raise(strategy: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    with pytest.raises(WorkerError, match=r"In a backward, `1\.shift` on rank 1 differs from that on rank 0"):
        fabric.launch(train_act_norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["fsdp", "ddp_fully_sharded", pytest.param("deepspeed_stage_3", marks=pytest.mark.thorough)]
)
def test_weights_that_the_first_forward_sets_in_gathered_copies_raise_there(strategy: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    words = r"ended with values of `1\.shift` that differ from its parameter.*run one forward before `fabric.setup`"
    with pytest.raises(WorkerError, match=words) as raised:
        fabric.launch(train_act_norm)
    assert "in train_act_norm\n    fabric.backward(model(" in str(raised.value), "in forward, not after backward"


def attached(fabric: Fabric, backward: Callable[[Tensor], Any] | None = None) -> list[int]:
    """The numbers of the steps whose forward runs with the watch attached. `backward`: of the loop."""
    model, optimizer = fabric.setup(*make())
    found = []
    for step in range(1, 40):
        if any(type(check).__name__ == "Watch" for check in fabric._connected.moments.checks):
            found.append(step)
        (backward or fabric.backward)(model(torch.full((2, 4), fabric.global_rank + 1.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_nothing_is_attached_to_a_step_that_is_not_watched() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, launcher="forkserver")
    assert fabric.launch(attached) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33], "until the backward after a watched step"
    assert Fabric(accelerator=ACCELERATOR, devices=2, launcher="forkserver", sanitize=False).launch(attached) == []


def test_a_loop_that_calls_no_backward_of_fabric_is_watched_in_its_first_steps() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, launcher="forkserver")
    assert fabric.launch(attached, Tensor.backward) == [1, 2, 3, 4, 5, 6]


class IgnoresTheIndex(Dataset[Tensor]):
    """Draws its next sample from a stream that is the same on all ranks."""

    def __init__(self) -> None:
        self.drawn = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        self.drawn += 1
        return torch.full((4,), float(self.drawn))


def read_the_same(fabric: Fabric, how: str) -> None:
    """`how`: losses are the same on all ranks, as was said or not, or batches, with losses that differ."""
    model, optimizer = fabric.setup(*make())
    batches: Any = [torch.full((2, 4), float(step)) for step in range(4)]
    if how == "batches":
        batches = fabric.setup_dataloaders(DataLoader(IgnoresTheIndex(), batch_size=2))
    if how == "said":
        fabric.setup_dataloaders([1, 2], use_distributed_sampler=False)
    for batch in batches:
        noise = fabric.global_rank if how == "batches" else 0
        fabric.backward(model(batch).square().sum() + noise)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["losses", "batches", "said"])
def test_ranks_that_read_the_same_samples_are_reported_once(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, launcher="forkserver").launch(read_the_same, how)
    heard = capfd.readouterr().err
    words = "all 2 ranks had the same batches or losses, to the last bit: they read the same samples"
    assert heard.count(words) == (how != "said")


def graphs_compiled(fabric: Fabric, is_compiled_before: bool) -> list[int]:
    """The number of graphs that the compiler has made, after each step."""
    from torch._dynamo.utils import counters

    net: Any = make()[0]
    if is_compiled_before:
        net = torch.compile(net, backend="aot_eager")
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    called = model if is_compiled_before else torch.compile(model, backend="aot_eager")
    found = []
    for _ in range(10):
        fabric.backward(called(torch.ones(2, 4)).square().sum(), model=model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_a_watched_step_compiles_nothing_again(strategy: str, is_compiled_before: bool) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    found = fabric.launch(graphs_compiled, is_compiled_before)
    assert found == [1] * 10


def test_a_device_that_records_steps_is_refused() -> None:
    from fabric.configure.request import Request
    from fabric.configure.resolve import sanitize_against_the_strategy
    from fabric.strategies.strategy_registry import make_strategy

    xla = make_strategy("xla")
    assert sanitize_against_the_strategy(xla, "'xla'", Request()) is None
    words = sanitize_against_the_strategy(xla, "'xla'", Request(sanitize="always"))
    assert words is not None
    assert "`sanitize='always'` reads weights and gradients in a step, and `strategy='xla'` records steps" in words
