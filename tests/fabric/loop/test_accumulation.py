"""Windows of micro-batches: one synchronisation and one step each, and what a loop may do to them."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import ACCELERATOR, only_on_cpu
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset
from worlds import run_world

from fabric import Fabric
from fabric.launchers.launcher import WorkerError
from fabric.launchers.world import World
from fabric.strategies import DDPStrategy
from fabric.strategies.gradients.sync import scale_gradients

PRESENT = "which has gradients already"
SAMPLES = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).to(ACCELERATOR)


def parts(seed: int = 2) -> tuple[nn.Linear, SGD]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    return model, SGD(model.parameters(), lr=0.1)


def alone() -> tuple[Fabric, nn.Linear, SGD]:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1)
    model, optimizer = fabric.setup(*parts())
    return fabric, model, optimizer


def ranks(world: World, strategy: Any = "ddp", sanitize: Any = "start") -> Fabric:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=world.size, sanitize=sanitize)
    fabric._connect(world)
    return fabric


class Stream(IterableDataset[Tensor]):
    """Samples of unknown number."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(SAMPLES[:7])


LOADERS = [list(SAMPLES[:7]), DataLoader(SAMPLES[:7]), DataLoader(Stream()), iter(SAMPLES[:7])]


@pytest.mark.parametrize("loader", LOADERS, ids=["list", "loader", "stream", "iterator"])
def test_the_last_window_is_shorter_and_no_micro_batch_is_lost(loader: Any) -> None:
    fabric, _, _ = alone()
    windows = [[batch.flatten() for batch in window] for window in fabric.accumulate(loader, 3)]
    assert [len(window) for window in windows] == [3, 3, 1]
    assert torch.equal(torch.stack([batch for window in windows for batch in window]), SAMPLES[:7])


class Restarting(Iterator[int]):
    """Begins again with each `iter`, as litdata's."""

    def __iter__(self) -> Restarting:
        self.position = -1
        return self

    def __next__(self) -> int:
        self.position += 1
        if self.position >= 5:
            raise StopIteration
        return self.position


def test_an_iterator_that_begins_again_with_each_iter_is_read_once() -> None:
    fabric, _, _ = alone()
    assert [list(window) for window in fabric.accumulate(Restarting(), 2)] == [[0, 1], [2, 3], [4]]


def test_a_window_knows_its_length_where_the_loader_does() -> None:
    fabric, _, _ = alone()
    assert [(len(window), len(list(window))) for window in fabric.accumulate(DataLoader(SAMPLES[:7]), 3)] == [
        (3, 3),
        (3, 3),
        (1, 1),
    ]
    for window in fabric.accumulate(DataLoader(Stream()), 3):
        with pytest.raises(TypeError, match=r"the number is known only at the end of the window.*weight=1"):
            len(window)
        break


def lengths(fabric: Fabric, loader: Any) -> list[tuple[int, int]]:
    """What each window says of its length, and its length."""
    return [(len(window), len(list(window))) for window in fabric.accumulate(loader, 3)]


def lengths_after_resuming(world: World) -> list[list[tuple[int, int]]]:
    """Of 27 samples of which 8 were read, two on each rank in a step: the rest with two, and with three on each."""
    fabric, found = ranks(world), []
    fabric.setup(*parts())
    for batch_size in (2, 3):
        loader = fabric.setup_dataloaders(DataLoader(range(27), 2))
        batches = iter(loader)
        for _ in range(8 // (2 * world.size)):
            next(batches)
        resumed = fabric.setup_dataloaders(DataLoader(range(27), batch_size))
        resumed.load_state_dict(loader.state_dict())
        found += [lengths(fabric, resumed), lengths(fabric, resumed)]  # the rest of the epoch, and the next one
    fabric.close()
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_window_of_a_resumed_epoch_has_the_length_that_it_says(size: int) -> None:
    [found, *_] = run_world(size, lengths_after_resuming)
    assert all(said == is_so for each in found for said, is_so in each)
    counts = [-(-27 // (samples * size)) for samples in (2, 3)]
    left = [-(-19 // (samples * size)) for samples in (2, 3)]
    assert [sum(is_so for _, is_so in each) for each in found] == [left[0], counts[0], left[1], counts[1]]


def test_no_micro_batch_beyond_the_window_has_been_read_at_its_step() -> None:
    fabric, _, _ = alone()
    read: list[int] = []

    def count() -> Iterator[int]:
        for number in range(7):
            read.append(number)
            yield number

    seen = []
    for window in fabric.accumulate(count(), 3):
        for _ in window:
            pass
        seen.append(len(read))
    assert seen == [3, 6, 7]


def test_a_window_that_is_left_by_break_cannot_be_stepped_and_is_discarded_by_zero_grad() -> None:
    fabric, model, optimizer = alone()
    before = model.weight.detach().clone()
    for number, window in enumerate(fabric.accumulate(SAMPLES[:6], 3)):
        for batch in window:
            fabric.backward(model(batch).sum())
            if number == 0:
                break
        if number == 0:
            with pytest.raises(RuntimeError, match=r"before the last micro-batch of a window.*discard the gradients"):
                optimizer.step()
            assert torch.equal(model.weight, before)
            optimizer.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, before - 0.1 * SAMPLES[1:6].sum(dim=0))


def test_gradients_of_an_unfinished_window_do_not_count_in_the_next() -> None:
    fabric, model, _ = alone()
    windows = fabric.accumulate(SAMPLES[:6], 3)
    for batch in next(windows):
        fabric.backward(model(batch).sum())
        break
    with pytest.raises(RuntimeError, match="was not finished, and its gradients would be added"):
        next(windows)


def test_a_step_after_a_last_micro_batch_without_backward_raises() -> None:
    fabric, model, optimizer = alone()
    window = next(fabric.accumulate(SAMPLES[:3], 3))
    for number, batch in enumerate(window):
        if number < 2:
            fabric.backward(model(batch).sum())
    with pytest.raises(RuntimeError, match=r"did not synchronise gradients.*0 \* loss"):
        optimizer.step()


@pytest.mark.parametrize(("number", "reported"), [(0, "accumulate\\(loader, 0\\)"), (2.0, "2.0")])
def test_a_window_needs_a_positive_number_of_micro_batches(number: Any, reported: str) -> None:
    fabric, _, _ = alone()
    with pytest.raises(ValueError, match=reported):
        fabric.accumulate(SAMPLES, number)


def test_accumulate_before_setup_raises() -> None:
    with pytest.raises(RuntimeError, match=r"before `fabric\.setup\(model\)`"):
        Fabric(accelerator=ACCELERATOR, devices=1).accumulate(SAMPLES, 2)


def test_a_weight_is_a_finite_number_of_zero_or_more() -> None:
    fabric, model, _ = alone()
    for weight, error in ((-1, ValueError), (float("nan"), ValueError), (torch.ones(2), ValueError)):
        with pytest.raises(error, match=r"weight"):
            fabric.backward(model(SAMPLES[0]).sum(), weight=weight)  # type: ignore[arg-type]


def test_losses_with_and_without_weights_in_one_window_raise() -> None:
    fabric, model, optimizer = alone()
    with fabric.no_backward_sync(model):
        fabric.backward(model(SAMPLES[0]).sum(), weight=1)
    with pytest.raises(RuntimeError, match="without `weight=` after one with a weight"):
        fabric.backward(model(SAMPLES[0]).sum())
    optimizer.zero_grad()
    fabric.backward(model(SAMPLES[0]).sum())  # what was discarded does not count


def test_a_weight_does_not_divide_gradients_that_are_divided_already_or_have_none() -> None:
    fabric, model, optimizer = alone()
    for set_to_none in (True, False):
        fabric.backward(model(SAMPLES[0]).sum(), weight=2)
        for is_synchronised in (True, False):
            with (
                fabric.no_backward_sync(model, enabled=not is_synchronised),
                pytest.raises(RuntimeError, match=PRESENT),
            ):
                fabric.backward(model(SAMPLES[0]).sum(), weight=2)
        optimizer.zero_grad(set_to_none=set_to_none)
        model(SAMPLES[0]).sum().backward()
        with pytest.raises(RuntimeError, match=PRESENT):
            fabric.backward(model(SAMPLES[0]).sum(), weight=2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    fabric.backward(model(SAMPLES[0]).sum(), weight=2)
    torch.testing.assert_close(model.weight.grad, SAMPLES[:1] / 2)


def test_a_weight_does_not_divide_gradients_of_another_model_with_the_same_parameter() -> None:
    fabric, model, _ = alone()
    other = nn.Linear(3, 1)
    other.weight = model.weight
    other = fabric.setup(other)
    fabric.backward(model(SAMPLES[0]).sum(), weight=2, model=model)
    with pytest.raises(RuntimeError, match=PRESENT):
        fabric.backward(other(SAMPLES[0]).sum(), weight=2, model=other)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_weights_of_discarded_gradients_do_not_count(set_to_none: bool) -> None:
    fabric, model, optimizer = alone()
    with fabric.no_backward_sync(model):
        fabric.backward(model(SAMPLES[0]).sum(), weight=5)
    optimizer.zero_grad(set_to_none=set_to_none)
    fabric.backward(model(SAMPLES[1]).sum(), weight=2)
    torch.testing.assert_close(model.weight.grad, SAMPLES[1:2] / 2)


@pytest.mark.parametrize("is_synchronised", [True, False])
def test_the_memory_of_gradients_that_were_set_to_none_is_free(is_synchronised: bool) -> None:
    fabric, model, optimizer = alone()
    with fabric.no_backward_sync(model, enabled=not is_synchronised):
        fabric.backward(model(SAMPLES[0]).sum(), weight=2)
    assert model.weight.grad is not None
    gradient = weakref.ref(model.weight.grad)
    optimizer.zero_grad()
    assert gradient() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1 / 3, torch.tensor(1 / 3, dtype=torch.float64)])
def test_each_product_of_a_gradient_and_a_factor_is_rounded_once(dtype: torch.dtype, factor: float | Tensor) -> None:
    parameters = [torch.zeros(64, dtype=each, requires_grad=True) for each in (dtype, torch.float64, dtype)]
    drawn = [torch.randn_like(each, requires_grad=False) for each in parameters]
    for parameter, gradient in zip(parameters, drawn, strict=True):
        parameter.grad = gradient.clone()
    scale_gradients(parameters, factor)
    for parameter, gradient in zip(parameters, drawn, strict=True):
        assert parameter.grad is not None
        wide = torch.promote_types(gradient.dtype, torch.float32)
        assert parameter.grad.equal((gradient.to(wide) * float(factor)).to(gradient.dtype))


def test_weights_divide_gradients_of_16_bits_exactly() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=1, precision="bf16-true")
    model = fabric.setup(parts()[0])
    fabric.backward(model(SAMPLES[0]).sum(), weight=3)
    torch.testing.assert_close(model.weight.grad, SAMPLES[:1].bfloat16().div(3), rtol=0, atol=0)


def test_where_all_weights_are_zero_gradients_are_zero() -> None:
    fabric, model, _ = alone()
    fabric.backward(0 * model(SAMPLES[0]).sum(), weight=0)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_a_weight_with_several_models_needs_the_model_of_its_loss() -> None:
    fabric, model, _ = alone()
    other, _ = fabric.setup(*parts(3))
    with pytest.raises(ValueError, match=r"Name them: `model=generator`"):
        fabric.backward(model(SAMPLES[0]).sum(), weight=2)
    fabric.backward((model(SAMPLES[0]) + other(SAMPLES[0])).sum(), weight=2, model=[model, other])
    fabric_grads = [each.weight.grad for each in (model, other)]
    for gradient in fabric_grads:
        torch.testing.assert_close(gradient, SAMPLES[:1] / 2)


def draw_weights(seed: int, size: int) -> list[list[list[int]]]:
    """Windows, of ranks, of the number of samples that each micro-batch counts: as many windows on each rank."""
    draw = random.Random(seed)
    return [[[draw.randint(0, 3) for _ in range(draw.randint(1, 4))] for _ in range(size)] for _ in range(4)]


def samples_of(window: int, rank: int, number: int, count: int) -> Tensor:
    drawn = torch.randn(count, 3, generator=torch.Generator().manual_seed(1000 * window + 100 * rank + number))
    return drawn.to(ACCELERATOR)


def train_weighted(world: World, seeds: list[int]) -> list[Tensor]:
    found = []
    for seed in seeds:
        fabric = ranks(world)
        model, optimizer = fabric.setup(*parts())
        for number, window in enumerate(draw_weights(seed, world.size)):
            counts = window[world.rank]
            for micro_batches in fabric.accumulate(list(enumerate(counts)), 4):
                for index, count in micro_batches:
                    loss = model(samples_of(number, world.rank, index, count)).square().sum()
                    fabric.backward(loss, weight=count)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.detach().cpu().clone())
        fabric.close()
    return found


def train_alone(seed: int, size: int) -> Tensor:
    model, optimizer = parts()
    model.to(ACCELERATOR)
    for number, window in enumerate(draw_weights(seed, size)):
        total = sum(sum(counts) for counts in window)
        for rank, counts in enumerate(window):
            for index, count in enumerate(counts):
                (model(samples_of(number, rank, index, count)).square().sum() / max(total, 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().cpu()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_those_of_one_process_whatever_windows_and_weights_the_ranks_have(size: int) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    seeds = [seed + number for number in range(6)]
    for found in run_world(size, train_weighted, seeds):
        for drawn, weight in zip(seeds, found, strict=True):
            torch.testing.assert_close(weight, train_alone(drawn, size), rtol=1e-5, atol=1e-6, msg=f"seed {drawn}")


BUCKETS: list[int] = []


def count_buckets(state: Any, bucket: Any) -> Any:
    BUCKETS.append(bucket.index())
    flat = bucket.buffer() / torch.distributed.get_world_size()
    work = torch.distributed.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def count_messages(world: World, weighted: bool) -> list[tuple[int, int]]:
    """After each window: how often gradients were sent by our hook, and how many all-reduces there were besides."""
    fabric = ranks(world, DDPStrategy(comm_hook=count_buckets), sanitize=False)
    model, optimizer = fabric.setup(*parts())
    given, others = torch.distributed.all_reduce, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        others.append(args[0].numel())
        return given(*args, **kwargs)

    torch.distributed.all_reduce = counted
    found = []
    try:
        for window in fabric.accumulate(SAMPLES[:10], 4):
            BUCKETS.clear()
            others.clear()
            for batch in window:
                fabric.backward(model(batch).sum(), weight=1 if weighted else None)
            optimizer.step()
            optimizer.zero_grad()
            found.append((len(BUCKETS), len(others) - len(BUCKETS)))
    finally:
        torch.distributed.all_reduce = given
    fabric.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_reduced_once_per_window_and_weights_add_one_number(weighted: bool) -> None:
    for found in run_world(2, count_messages, weighted):
        assert found == [(1, int(weighted))] * 3


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("in the backward of a loss")


def mix_weights(world: World) -> list[list[float]]:
    """The gradients of windows with and without weights, of layers frozen and unfrozen; then after two backwards that
    raise, and of a backward of torch."""
    fabric = ranks(world)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    found = []

    def mine(batch: Tensor, number: int) -> Tensor:
        return batch if world.size == 1 else batch[:number] if world.rank == 0 else batch[number:]

    def finish() -> None:
        found.append([number for p in model.parameters() if p.grad is not None for number in p.grad.flatten().tolist()])
        optimizer.step()
        optimizer.zero_grad()

    for step, batch in enumerate(SAMPLES[:32].split(4)):
        model[0].requires_grad_(step % 3 != 2)
        part = mine(batch, 3 if step % 2 else 2)
        if step == 4:  # a mean over equal parts, without a weight
            fabric.backward(model(batch).square().mean())
        else:
            # Halves and thirds have no short form in binary.
            fabric.backward(model(part).square().sum() / 3, weight=torch.tensor(len(part)) / 3)
        finish()
    for _ in range(2):
        loss = model(SAMPLES[:4]).sum()
        loss.register_hook(fail)
        with pytest.raises(ArithmeticError):
            fabric.backward(loss, weight=4)
        optimizer.zero_grad()
    part = mine(SAMPLES[:4], 1)
    fabric.backward(model(part).square().sum(), weight=len(part))
    finish()
    model(SAMPLES[:4]).sum().backward()
    finish()
    fabric.close()
    return found


@pytest.mark.slow
def test_weights_are_exact_beside_other_backwards_and_after_one_that_raised() -> None:
    (alone,) = run_world(1, mix_weights)
    for found in run_world(2, mix_weights):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def weigh_on_some_ranks(world: World) -> None:
    fabric = ranks(world, sanitize="always")
    model, optimizer = fabric.setup(*parts())
    for step, batch in enumerate(SAMPLES[:16].split(4)):
        fabric.backward(model(batch).sum(), weight=None if step == 1 and world.rank == 1 else 4)
        optimizer.step()
        optimizer.zero_grad()


@only_on_cpu("over NCCL the watch finds that calls differ, in other words")
@pytest.mark.slow
def test_a_weight_on_some_ranks_raises_in_a_watched_step() -> None:
    with pytest.raises(WorkerError, match="The 2 ranks did not make the same call"):
        run_world(2, weigh_on_some_ranks)


def delay_backwards(world: World) -> tuple[Tensor, str]:
    """Forwards of a whole window, and one backward of their sum at its end; then one backward each."""
    fabric = ranks(world)
    model, _ = fabric.setup(*parts())
    window = next(fabric.accumulate(SAMPLES[world.rank :: 2][:3], 3))
    fabric.backward(sum(model(batch).sum() for batch in window))  # type: ignore[arg-type]
    assert model.weight.grad is not None
    gradient = model.weight.grad.cpu().clone()
    model.zero_grad()
    window = next(fabric.accumulate(SAMPLES[:3], 3))
    losses = [model(batch).sum() for batch in window]
    reported = ""
    try:
        for loss in losses:
            fabric.backward(loss)
    except RuntimeError as error:
        reported = str(error)
    fabric.close()
    return gradient, reported


@pytest.mark.slow
def test_backwards_that_come_after_all_forwards_of_a_window_are_exact_or_raise() -> None:
    for gradient, reported in run_world(2, delay_backwards):
        expected = (SAMPLES[0::2][:3].sum(0) + SAMPLES[1::2][:3].sum(0))[None] / 2
        torch.testing.assert_close(gradient, expected.cpu())
        assert "were not averaged over the ranks" in reported


def pair() -> tuple[nn.Module, nn.Module, SGD, SGD]:
    torch.manual_seed(4)
    maker, judge = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return maker, judge, SGD(maker.parameters(), lr=0.1), SGD(judge.parameters(), lr=0.2)


def loss_of_pair(maker: Any, judge: Any, batch: Tensor) -> Tensor:
    made = maker(batch[None])
    loss: Tensor = (judge(made.detach()) - judge(batch[None])).square().sum() + judge(made).square().sum()
    return loss


def train_pair(world: World, strategy: str) -> list[dict[str, Tensor]]:
    fabric = ranks(world, strategy)
    maker, judge, of_maker, of_judge = pair()
    maker, of_maker = fabric.setup(maker, of_maker)
    judge, of_judge = fabric.setup(judge, of_judge)
    for window in fabric.accumulate(SAMPLES[world.rank : 14 : 2], 3):
        for batch in window:
            fabric.backward(loss_of_pair(maker, judge, batch))
        for optimizer in (of_maker, of_judge):
            optimizer.step()
            optimizer.zero_grad()
    found = [fabric.state_dict(model, all_ranks=True) for model in (maker, judge)]
    fabric.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_window_accumulates_the_gradients_of_two_models_that_share_a_loss(strategy: str) -> None:
    maker, judge, *optimizers = pair()
    models = nn.ModuleList([maker, judge]).to(ACCELERATOR)
    for start, end in ((0, 6), (6, 12), (12, 14)):  # three, three and one micro-batch of two ranks
        for batch in SAMPLES[start:end]:
            (loss_of_pair(maker, judge, batch) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found in run_world(2, train_pair, strategy):
        torch.testing.assert_close(found, [each.state_dict() for each in models.cpu()], rtol=1e-5, atol=1e-6)


def adversaries() -> tuple[nn.Module, SGD, nn.Module, SGD]:
    torch.manual_seed(5)
    maker = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))
    critic = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
    return maker, SGD(maker.parameters(), lr=0.1), critic, SGD(critic.parameters(), lr=0.1)


def train_adversaries(tools: Any, rank: int, size: int, in_one_window: bool) -> list[dict[str, Tensor]]:
    """A critic is frozen in the backward of what it judges, in each micro-batch or after its own step. Plain PyTorch
    without `tools`."""
    maker, of_maker, critic, of_critic = adversaries()
    nn.ModuleList([maker, critic]).to(ACCELERATOR)
    if tools is not None:
        maker, of_maker = tools.setup(maker, of_maker)
        critic, of_critic = tools.setup(critic, of_critic)

    def windows(start: int) -> Any:
        batches = [SAMPLES[begin : begin + 4].chunk(size)[rank] for begin in range(start, start + 8, 4)]
        return [batches] if tools is None else tools.accumulate(batches, 2)

    def backward(loss: Tensor, model: nn.Module) -> None:
        if tools is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            tools.backward(loss, model=model)

    def judge(batch: Tensor) -> None:
        critic.requires_grad_(True)
        backward((critic(maker(batch).detach()).mean() - critic(batch).mean()) / 2, critic)

    def make(batch: Tensor) -> None:
        critic.requires_grad_(False)
        backward(-critic(maker(batch)).mean() / 2, maker)

    for start in range(0, 32, 8):
        for passes in [[judge, make]] if in_one_window else [[judge], [make]]:
            for window in windows(start):
                for batch in window:
                    for each in passes:
                        each(batch)
            for each, optimizer in ((judge, of_critic), (make, of_maker)):
                if each in passes:
                    critic.requires_grad_(True)
                    optimizer.step()
                    optimizer.zero_grad()
    if tools is None:
        return [dict(model.cpu().state_dict()) for model in (maker, critic)]
    return [tools.state_dict(model, all_ranks=True) for model in (maker, critic)]


def train_adversaries_both_ways(world: World, strategy: str) -> list[Any]:
    found = []
    for in_one_window in (False, True):
        fabric = ranks(world, strategy)
        found.append(train_adversaries(fabric, world.rank, world.size, in_one_window))
        fabric.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "fsdp",
        "ddp_sharded",
        "ddp_fully_sharded",
        "deepspeed_stage_1",
        "deepspeed_stage_2",
        "deepspeed_stage_3",
        "deepspeed_stage_3_offload",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_critic_that_is_frozen_in_the_backward_of_what_it_judges_keeps_its_own_gradients(strategy: str) -> None:
    expected = [train_adversaries(None, 0, 1, in_one_window) for in_one_window in (False, True)]
    for found in run_world(2, train_adversaries_both_ways, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
