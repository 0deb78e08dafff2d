"""Programs for which a root that stays gathered after forward gives other numbers: under ours, those of one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ManualContext, ManualStrategy, ModelParallelStrategy, Parallelized, Strategy
from fabric.strategies.tensors.dtensor import whole

Backward: TypeAlias = Callable[[Tensor], None]
KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""All of them under one strategy, for they step the same DTensors under the others."""


def make_models() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return generator, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def batch(step: int, rank: int = 0, size: int = 1) -> Tensor:
    """This rank's part of a batch of four."""
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    return whole.chunk(size)[rank]


def at_once(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


def by_hand(model: nn.Module, context: ManualContext) -> Parallelized:
    from torch.distributed.fsdp import fully_shard

    model.to(context.device)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    fully_shard(model, mesh=context.mesh)
    return Parallelized(module=model)


STRATEGIES: dict[str, tuple[Strategy, int]] = {
    "fsdp": (FSDPStrategy(), 2),
    "units": (FSDPStrategy(auto_wrap_policy=nn.Linear), 2),
    "hsdp": (FSDPStrategy(device_mesh=(2, 2)), 4),
    "model_parallel": (ModelParallelStrategy(parallelize_fn=at_once, shard=2), 2),
    "manual": (ManualStrategy(parallelize=by_hand), 2),
}


def evaluate_between(models: Sequence[Any], optimizers: Sequence[Optimizer], backward: Backward, x: Any) -> None:
    """A forward with gradients between backward and step, whose loss is printed."""
    model, optimizer = models[0], optimizers[0]
    for step in range(2):
        optimizer.zero_grad()
        backward(model(x(step)).square().mean())
        model(x(step))
        optimizer.step()


def clear_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def play(
    clear: Callable[[nn.Module], None],
    models: Sequence[Any],
    optimizers: Sequence[Optimizer],
    backward: Backward,
    x: Any,
) -> None:
    """DCGAN, as its authors wrote it: gradients of the generator are cleared between its forward and its backward."""
    (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
    for step in range(2):
        of_discriminator.zero_grad()
        fake = generator(x(step))
        backward(discriminator(fake.detach()).square().mean())
        of_discriminator.step()
        clear(generator)
        backward((discriminator(fake) - 1).square().mean())
        of_generator.step()


def write_after_evaluation(models: Sequence[Any], optimizers: Sequence[Optimizer], backward: Backward, x: Any) -> None:
    """Weights are halved after evaluations, without gradients and with them."""
    model, optimizer = models[0], optimizers[0]
    for step in range(2):
        with torch.no_grad() if step else torch.enable_grad():
            model(x(step))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        optimizer.zero_grad()
        backward(model(x(step)).square().mean())
        optimizer.step()


def penalise(models: Sequence[Any], optimizers: Sequence[Optimizer], backward: Backward, x: Any) -> None:
    """The sum of squared weights is in the loss."""
    model, optimizer = models[0], optimizers[0]
    for step in range(2):
        optimizer.zero_grad()
        loss = model(x(step)).square().mean()
        squares = sum(parameter.square().sum() for parameter in model.parameters())
        backward(loss + 0.1 * (squares.full_tensor() if isinstance(squares, DTensor) else squares))
        optimizer.step()


def clip(models: Sequence[Any], optimizers: Sequence[Optimizer], backward: Backward, x: Any) -> None:
    """By torch's own function."""
    model, optimizer = models[0], optimizers[0]
    for step in range(2):
        optimizer.zero_grad()
        backward(10 * model(x(step)).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


PROGRAMS: dict[str, Callable[..., None]] = {
    "evaluation with gradients before the step": evaluate_between,
    "model.zero_grad before the generator's backward": lambda *args: play(nn.Module.zero_grad, *args),
    "parameter.grad = None before the generator's backward": lambda *args: play(clear_by_hand, *args),
    "weights written after an evaluation": write_after_evaluation,
    "penalty of the weights": penalise,
    "clip_grad_norm_ of torch": clip,
}


def run_all(fabric: Fabric, kinds: Sequence[str]) -> list[str]:
    """The programs that did not end at the weights of one process."""
    place = fabric.global_rank, fabric.world_size
    found = []
    for name, program in PROGRAMS.items():
        for kind in kinds:
            for order in ((0, 1), (1, 0)) if "generator" in name else ((0, 1),):  # others train the first alone
                models, plain = make_models(), make_models()
                optimizers, theirs = (
                    [AdamW(m.parameters(), lr=0.05, **KINDS[kind]) for m in some] for some in (models, plain)
                )
                for index in order:
                    fabric.setup(models[index], optimizers[index])
                program(models, optimizers, fabric.backward, lambda step: batch(step, *place))
                program(plain, theirs, Tensor.backward, batch)
                error = max(_error(model, other) for model, other in zip(models, plain, strict=True))
                if not error < 1e-5:
                    found.append(f"{name}, {kind}, set up in the order {order}: {error:.2g}")
    return found


def _error(model: nn.Module, plain: nn.Module) -> float:
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((whole(one).cpu() - other).detach().abs().max()) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [each if each != "hsdp" else pytest.param(each, marks=pytest.mark.thorough) for each in STRATEGIES]
)
def test_every_order_of_forward_backward_and_step_trains_as_one_process_does(name: str) -> None:
    strategy, size = STRATEGIES[name]
    kinds = [*KINDS] if name == "units" else ["foreach"]
    assert Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy).launch(run_all, kinds) == []


def kinds_and_windows(fabric: Fabric) -> tuple[list[str], float, float]:
    """The classes of parameters after a forward; the error after a window that was given up; and after a second way."""
    model, _ = make_models()
    plain = copy.deepcopy(model)
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.05))
    place = fabric.global_rank, fabric.world_size
    model(batch(0, *place))
    kinds = sorted({type(parameter).__name__ for parameter in model.parameters()})
    theirs = AdamW(plain.parameters(), lr=0.05)
    errors = []
    for set_to_none in (True, False):
        for step in range(3):
            with fabric.no_backward_sync(model):  # of a window that a `break` leaves
                fabric.backward(model(batch(10 + step, *place)).square().mean())
            optimizer.zero_grad(set_to_none)
            theirs.zero_grad()
            with fabric.no_backward_sync(model):
                fabric.backward(model(batch(20 + step, *place)).square().mean())
            fabric.backward(model(batch(step, *place)).square().mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            (plain(batch(20 + step)).square().mean() + plain(batch(step)).square().mean()).backward()
            theirs.step()
        errors.append(_error(model, plain))
    return kinds, errors[0], errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "model_parallel"])
def test_gradients_of_a_window_that_was_given_up_are_dropped_and_parameters_are_shards(name: str) -> None:
    strategy, size = STRATEGIES[name]
    kinds, to_none, to_zero = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy).launch(kinds_and_windows)
    assert kinds == ["DTensor"]
    assert to_none < 1e-5
    assert to_zero < 1e-5


def weigh(fabric: Fabric) -> list[float]:
    """Errors after steps of windows with weights, each after one that was given up."""
    place, errors = (fabric.global_rank, fabric.world_size), []
    for foreach in (False, True):
        for set_to_none in (False, True):
            model, _ = make_models()
            plain = copy.deepcopy(model)
            model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.05, foreach=foreach))
            with fabric.no_backward_sync(model):
                fabric.backward(model(batch(10, *place)).square().sum(), weight=7, model=model)
            optimizer.zero_grad(set_to_none)
            with fabric.no_backward_sync(model):
                fabric.backward(model(batch(1, *place)).square().sum(), weight=2, model=model)
            fabric.backward(model(batch(2, *place)).square().sum(), weight=2, model=model)
            optimizer.step()
            ((plain(batch(1)).square().sum() + plain(batch(2)).square().sum()) / 8).backward()
            SGD(plain.parameters(), lr=0.05).step()
            errors.append(_error(model, plain))
    return errors


@pytest.mark.slow
def test_weights_of_a_window_that_was_given_up_count_in_no_later_one() -> None:
    errors = Fabric(accelerator=ACCELERATOR, devices=2, strategy="fsdp").launch(weigh)
    assert max(errors) < 1e-5, errors


def grad_of_parameters(fabric: Fabric) -> str:
    model = fabric.setup(make_models()[0])
    with pytest.raises(RuntimeError) as raised:
        torch.autograd.grad(model(batch(0)).sum(), list(model.parameters()))
    return str(raised.value)


@pytest.mark.slow
def test_gradients_of_autograd_grad_with_respect_to_shards_are_refused_by_torch() -> None:
    message = Fabric(accelerator=ACCELERATOR, devices=2, strategy="fsdp").launch(grad_of_parameters)
    assert re.search("appears to not have been used in the graph", message)


def is_gathered(fabric: Fabric) -> bool:
    """Whether a parameter between forward and backward is the gathered copy."""
    model = fabric.setup(make_models()[0])
    model(batch(0))
    return not isinstance(next(iter(model.parameters())), DTensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(reshard_after_forward=None),
        FSDPStrategy(reshard_after_forward=False),
        ModelParallelStrategy(parallelize_fn=at_once, shard=2, reshard_roots=False),
        ManualStrategy(parallelize=by_hand, reshard_roots=False),
    ],
    ids=["fsdp-none", "fsdp-false", "model_parallel", "manual"],
)
def test_torch_s_own_default_is_there_for_those_who_write_it(strategy: Strategy) -> None:
    assert Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver").launch(is_gathered)
