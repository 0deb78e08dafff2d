"""Programs with a mistake that would train to wrong numbers: under every strategy they raise, or come out right."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import LBFGS, SGD, Optimizer
from worlds import launch_each, run_each

from fabric import Fabric, World
from fabric.strategies.collectives.collective import CollectiveError
from fabric.strategies.strategy import Strategy
from fabric.strategies.strategy_registry import make_strategy
from fabric.strategies.tensors.parameters import parameters_of

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from rows import WITH_A_FUNCTION

Change: TypeAlias = Callable[[nn.Module], None]
NUM_STEPS = 2
"""What is done between the first and the second has an effect on the second."""


def make_net(shift: float = 0.0) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view(parameter.shape) + shift)
    return net


def make_optimizer(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: Callable[[Tensor], Tensor], step: int, rank: int = 0, size: int = 1) -> Tensor:
    inputs = torch.linspace(-1, 1 + step, 16).view(4, 4).cos()
    targets = torch.linspace(-2, step, 8).view(4, 2)
    half = slice(rank * 4 // size, (rank + 1) * 4 // size)
    return (model(inputs[half]) - targets[half]).square().mean()


def steps(
    model: nn.Module,
    optimizer: Optimizer,
    backward: Callable[[Tensor], Any],
    *,
    rank: int = 0,
    size: int = 1,
    called: Callable[[Tensor], Tensor] | None = None,
    before: Change = lambda model: None,
    after: Change = lambda model: None,
) -> nn.Module:
    for step in range(NUM_STEPS):
        if step == 1:
            before(model)
        backward(loss_of(called or model, step, rank, size))
        after(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


def usual(fabric: Fabric, **mistake: Any) -> nn.Module:
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))
    backward = mistake.pop("backward", lambda loss: fabric.backward(loss, model=model))
    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    return steps(model, optimizer, backward, **place, **mistake)


def early_optimizer(fabric: Fabric) -> nn.Module:
    net = make_net()
    optimizer = make_optimizer(net)
    model = fabric.setup(net)
    return steps(model, optimizer, fabric.backward, rank=fabric.global_rank, size=fabric.world_size)


def optimizer_of_its_own(fabric: Fabric) -> nn.Module:
    model = fabric.setup(make_net())
    optimizer = make_optimizer(model)
    return steps(model, optimizer, fabric.backward, rank=fabric.global_rank, size=fabric.world_size)


def neither_set_up_nor_fabric_backward(fabric: Fabric) -> nn.Module:
    net = make_net()
    optimizer = make_optimizer(net)
    model = fabric.setup(net)
    return steps(model, optimizer, lambda loss: loss.backward(), rank=fabric.global_rank, size=fabric.world_size)


def submodules(fabric: Fabric) -> nn.Module:
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))
    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    return steps(model, optimizer, fabric.backward, called=lambda x: model[2](model[1](model[0](x))), **place)


def called_as_a_method(fabric: Fabric) -> nn.Module:
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))
    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    return steps(model, optimizer, fabric.backward, called=lambda x: model.forward(x), **place)


def plain_backward(fabric: Fabric) -> nn.Module:
    return usual(fabric, backward=lambda loss: loss.backward())


def never_synchronised(fabric: Fabric) -> nn.Module:
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))

    def backward(loss: Tensor) -> None:
        with fabric.no_backward_sync(model):
            fabric.backward(loss, model=model)

    return steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size)


def clip(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 0.05)


def clip_each(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 0.01)


def group_added(fabric: Fabric) -> nn.Module:
    """A layer on top of the model, whose parameters are added to the prepared optimizer."""
    net, head = make_net(), nn.Linear(2, 2)
    model, optimizer = fabric.setup(net, make_optimizer(net))
    optimizer.add_param_group({"params": list(head.parameters())})
    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    return steps(model, optimizer, backward, called=lambda x: head(model(x)), **place)


def load(model: nn.Module) -> None:
    model.load_state_dict(make_net(0.3).state_dict())


@torch.no_grad()
def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def replace_a_parameter(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.linspace(-1, 1, 16).view(2, 8))


def replace_a_layer(model: Any) -> None:
    model[2] = make_net(0.1)[2]


def halve_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def swapped_on_rank_zero(fabric: Fabric) -> nn.Module:
    def swap(model: nn.Module) -> None:
        if fabric.global_rank == 0:
            own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict({name: tensor * 2 for name, tensor in own.items()})
            model.load_state_dict(own)

    return usual(fabric, before=swap)


def broadcast_by_hand(fabric: Fabric) -> nn.Module:
    def load_and_broadcast(model: nn.Module) -> None:
        if fabric.global_rank == 0:
            load(model)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)

    return usual(fabric, before=load_and_broadcast)


def averaged_by_hand(fabric: Fabric) -> nn.Module:
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))

    def backward(loss: Tensor) -> None:
        with fabric.no_backward_sync(model):
            fabric.backward(loss / fabric.world_size, model=model)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size)


def frozen_critic(fabric: Fabric) -> nn.Module:
    """A critic is trained before each step of the model, and frozen in it. Its bias learns, and cancels in the loss."""
    net, other = make_net(), nn.Linear(2, 2)
    nn.init.eye_(other.weight)
    nn.init.zeros_(other.bias)
    critic, critics = fabric.setup(other, SGD([{"params": [other.weight], "lr": 0.0}, {"params": [other.bias]}], lr=1))
    model, optimizer = fabric.setup(net, make_optimizer(net))

    def called(inputs: Tensor) -> Tensor:
        critic.requires_grad_(True)
        fabric.backward(critic(torch.ones(2, 2)).sum(), model=critic)
        critics.step()
        critics.zero_grad()
        critic.requires_grad_(False)
        output = critic(model(inputs)) - critic(torch.zeros(1, 2))
        assert isinstance(output, Tensor)
        return output

    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    steps(model, optimizer, lambda loss: fabric.backward(loss, model=model), called=called, **place)
    with torch.no_grad():
        assert critic(torch.zeros(1, 2)).tolist() == [[-2 * NUM_STEPS] * 2], "as many gradients of two rows"
    return model


def gradient_of_the_input(fabric: Fabric) -> nn.Module:
    """An adversarial example, before each step."""
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))

    def called(inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs)
        output = model(inputs.detach() + 0 * gradient)
        assert isinstance(output, Tensor)
        return output

    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    return steps(model, optimizer, lambda loss: fabric.backward(loss, model=model), called=called, **place)


def early_optimizer_set_up_later(fabric: Fabric) -> nn.Module:
    net = make_net()
    optimizer = make_optimizer(net)
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(optimizer)
    return steps(model, optimizer, fabric.backward, rank=fabric.global_rank, size=fabric.world_size)


def hooks_before(fabric: Fabric) -> nn.Module:
    net = make_net()
    for parameter in net.parameters():
        parameter.register_hook(torch.clone)
    model, optimizer = fabric.setup(net, make_optimizer(net))
    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    return steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size)


def hook_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def zero_a_row(model: Any) -> None:
    model[0].weight.data[2].zero_()
    with torch.no_grad():
        model[2].weight[1] = 0.5


def assign_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def start_as_identity(model: Any) -> None:
    nn.init.eye_(model[0].weight)
    nn.init.eye_(model[2].weight)


def other_weights(fabric: Fabric | None = None) -> nn.Module:
    """The model is called with halves of its weights."""

    def call(model: nn.Module, inputs: Tensor) -> Tensor:
        weights = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
        output = torch.func.functional_call(model, weights, (inputs,))
        assert isinstance(output, Tensor)
        return output

    net = make_net()
    optimizer = make_optimizer(net)
    if fabric is None:
        return steps(net, optimizer, lambda loss: loss.backward(), called=partial(call, net))
    model, prepared = fabric.setup(net, optimizer)
    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    return steps(model, prepared, backward, called=partial(call, model), **place)


def second_derivatives(fabric: Fabric | None = None) -> nn.Module:
    """MAML: each step adapts weights to a half of the samples, and judges them by the other half."""
    model: nn.Module = make_net()
    optimizer = make_optimizer(model)
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)

    def adapted(step: int, rank: int, size: int) -> Tensor:
        inner = loss_of(model, step, rank, size)
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        weights = {name: each - 0.1 * g for (name, each), g in zip(parameters.items(), gradients, strict=True)}
        return loss_of(lambda x: torch.func.functional_call(model, weights, (x,)), step + 1, rank, size)

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        if fabric is None:
            ((adapted(step, 0, 2) + adapted(step, 1, 2)) / 2).backward()
        else:
            fabric.backward(adapted(step, fabric.global_rank, fabric.world_size), model=model)
        optimizer.step()
    return model


def gradients_of_its_own(fabric: Fabric, average: Change = lambda model: None) -> nn.Module:
    """What `torch.autograd.grad` returns is assigned to `grad`."""
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))

    def backward(loss: Tensor) -> None:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        average(model)

    return steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size)


def gradients_of_its_own_averaged(fabric: Fabric) -> nn.Module:
    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = fabric.all_reduce(parameter.grad)

    return gradients_of_its_own(fabric, average)


def updates_of_its_own(fabric: Fabric) -> nn.Module:
    """Gradient descent without an optimizer, by the gradients of one rank."""
    model = fabric.setup(make_net())
    for step in range(2 * NUM_STEPS):
        loss = loss_of(model, step, fabric.global_rank, fabric.world_size)
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
    return model


def weighted_by_gradients(fabric: Fabric) -> nn.Module:
    """The weight of a loss follows from gradients of one layer, as in VQGAN: they are read, and averaged by hand."""
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))

    def backward(loss: Tensor) -> None:
        weight: Any = model[2].weight  # type: ignore[index]
        gradient = fabric.all_reduce(torch.autograd.grad(loss, weight, retain_graph=True)[0])
        fabric.backward(loss * (gradient.norm() / gradient.norm()), model=model)

    return steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size)


def steps_within_backward(fabric: Fabric) -> nn.Module:
    """Each parameter is stepped, and its gradient freed, as soon as it has arrived."""
    model = fabric.setup(make_net())
    optimizers = {each: SGD([each], lr=0.1, momentum=0.9) for each in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    nothing = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    return steps(model, nothing, backward, rank=fabric.global_rank, size=fabric.world_size)


def penalised(fabric: Fabric | None = None) -> nn.Module:
    """A gradient penalty, as for the critic of a GAN: gradients of the last step are there in both forwards."""
    model: nn.Module = make_net()
    optimizer = make_optimizer(model)
    rank, size = 0, 1
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        rank, size = fabric.global_rank, fabric.world_size
    for step in range(NUM_STEPS):
        inputs = torch.linspace(-1, step, 16).view(4, 4).sin()[rank * 4 // size : (rank + 1) * 4 // size]
        inputs.requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        loss = loss_of(model, step, rank, size) + penalty
        optimizer.zero_grad()
        loss.backward() if fabric is None else fabric.backward(loss, model=model)
        optimizer.step()
    return model


def penalised_once(fabric: Fabric | None = None) -> nn.Module:
    """R1: the gradient penalty is of the forward whose output is in the loss."""
    model: nn.Module = make_net()
    optimizer = make_optimizer(model)
    rank, size = 0, 1
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        rank, size = fabric.global_rank, fabric.world_size
    inputs = torch.linspace(-1, 1, 16).view(4, 4).sin()[rank * 4 // size : (rank + 1) * 4 // size].requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    loss = output.square().mean() + gradient.square().mean()
    loss.backward() if fabric is None else fabric.backward(loss, model=model)
    optimizer.step()
    return model


def view_changed(fabric: Fabric | None = None) -> nn.Module:
    """An output that is a view is changed in place, as a temperature divides logits."""
    model: nn.Module = nn.Sequential(*make_net(), nn.Unflatten(1, (2,)))
    optimizer: Optimizer = make_optimizer(model)
    place = {}
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        place = {"rank": fabric.global_rank, "size": fabric.world_size}
    backward = Tensor.backward if fabric is None else partial(fabric.backward, model=model)
    return steps(model, optimizer, backward, called=lambda inputs: model(inputs).div_(2), **place)


class Layerwise(SGD):
    """LARS: uses a norm of each parameter."""

    updates_each = "parameter"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            parameter.sub_(parameter.grad * (parameter.norm() / parameter.grad.norm()), alpha=0.1)


class WithGlobalNorm(SGD):
    """Uses the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [each.grad for each in self.param_groups[0]["params"]]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for parameter, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            parameter.sub_(gradient / norm, alpha=0.1)


class CallsClosure(SGD):
    """SAM and others compute gradients within the step."""

    updates_each = "element"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def stepped_with_closure(make: Callable[[Any], Optimizer], step: int, fabric: Fabric | None = None) -> nn.Module:
    model: nn.Module = make_net()
    optimizer = make(model.parameters())
    rank, size = 0, 1
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        rank, size = fabric.global_rank, fabric.world_size

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, size)
        loss.backward() if fabric is None else fabric.backward(loss, model=model)
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    return model


closure_called = partial(stepped_with_closure, partial(CallsClosure, lr=0.1), 1)
searched = partial(stepped_with_closure, partial(LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"), 0)
"""LBFGS chooses the length of each step by the loss that its closure returns."""


def mapped(fabric: Fabric) -> nn.Module:
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))
    one_by_one = torch.func.vmap(lambda sample: model(sample[None])[0])
    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    return steps(model, optimizer, fabric.backward, called=one_by_one, **place)


def stepped_by(kind: type[Optimizer], fabric: Fabric | None = None) -> nn.Module:
    model: nn.Module = make_net()
    optimizer = kind(model.parameters())
    if fabric is None:
        return steps(model, optimizer, lambda loss: loss.backward())
    model, optimizer = fabric.setup(model, optimizer)
    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    return steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size)


def wrapped_by_hand(fabric: Fabric) -> nn.Module:
    net = DistributedDataParallel(make_net())
    model, optimizer = fabric.setup(net, make_optimizer(net))
    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    return steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size)


def lazy(fabric: Fabric) -> nn.Module:
    model = fabric.setup(nn.Sequential(nn.LazyLinear(2)))
    assert isinstance(model, nn.Module)
    return model


def over_groups(
    fabric: Fabric, *, before: Change = lambda model: None, after: Change = lambda model: None
) -> nn.Module:
    """`before` and `after` get the parameters that the optimizer holds, in a module."""

    def held(change: Change) -> Change:
        return lambda model: change(nn.ParameterList(parameters_of(optimizer)))

    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))
    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    place = {"rank": fabric.global_rank, "size": fabric.world_size}
    return steps(model, optimizer, backward, before=held(before), after=held(after), **place)


def descended() -> nn.Module:
    net = make_net()
    return steps(net, SGD(net.parameters(), lr=0.1), lambda loss: loss.backward())


def read_gradients(fabric: Fabric) -> nn.Module:
    """Scales the rate by a norm of gradients, which are the average on every rank."""
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net))
    norms = []

    def read(model: nn.Module) -> None:
        assert all(each.grad is not None for each in model.parameters()), "some gradients are on other ranks"
        norms.append(sum(float(whole(each.grad).norm()) for each in model.parameters()))

    backward = lambda loss: fabric.backward(loss, model=model)  # noqa: E731
    steps(model, optimizer, backward, rank=fabric.global_rank, size=fabric.world_size, after=read)
    expected: list[float] = []
    net = make_net()
    after = lambda model: expected.append(sum(float(each.grad.norm()) for each in model.parameters()))  # noqa: E731
    steps(net, make_optimizer(net), lambda loss: loss.backward(), after=after)
    assert torch.allclose(torch.tensor(norms), torch.tensor(expected)), "wrong norms"
    return model


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


class MomentumEncoder(nn.Module):
    """Its forward changes weights that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = make_net(), make_net(shift=0.5).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data.mul_(0.5).add_(query.data, alpha=0.5)
        output = self.query(inputs) - self.key(inputs)
        assert isinstance(output, Tensor)
        return output


def changed_in_forward(fabric: Fabric | None = None) -> nn.Module:
    net = MomentumEncoder()
    optimizer = make_optimizer(net.query)
    if fabric is None:
        return steps(net, optimizer, lambda loss: loss.backward())
    model, stepped = fabric.setup(net, optimizer)
    return steps(model, stepped, fabric.backward, rank=fabric.global_rank, size=fabric.world_size)


def renormalizing(fabric: Fabric) -> nn.Module:
    """Each forward of such an embedding rescales the rows that this rank reads."""
    net = nn.Sequential(nn.Embedding(4, 2, max_norm=1), nn.Linear(2, 1))
    nn.init.ones_(net[0].weight)
    model, optimizer = fabric.setup(net, make_optimizer(net))
    for _ in range(NUM_STEPS):
        fabric.backward(model(torch.tensor([3 * fabric.global_rank])).sum())  # a row of its own shard
        optimizer.step()
        optimizer.zero_grad()
    return model


def evaluated_on_rank_zero(fabric: Fabric) -> nn.Module:
    """Its dropout stays off there."""
    net = nn.Sequential(make_net(), nn.Dropout(0.5))
    model, optimizer = fabric.setup(net, make_optimizer(net))
    if fabric.global_rank == 0:
        model.eval()
    return steps(model, optimizer, fabric.backward, rank=fabric.global_rank, size=fabric.world_size)


PROGRAMS: dict[str, tuple[Callable[[Fabric], nn.Module], dict[str, Change]]] = {
    "no mistake": (usual, {}),
    "optimizer from before setup": (early_optimizer, {}),
    "optimizer that was not set up": (optimizer_of_its_own, {}),
    "optimizer from before setup, plain backward": (neither_set_up_nor_fabric_backward, {}),
    "group of parameters added to the optimizer": (group_added, {}),
    "submodules called by themselves": (submodules, {}),
    "forward called as a method": (called_as_a_method, {}),
    "plain backward": (plain_backward, {}),
    "never synchronised": (never_synchronised, {}),
    "clip_grad_norm_ of torch": (lambda fabric: usual(fabric, after=clip), {"after": clip}),
    "clip_grad_value_ of torch": (lambda fabric: usual(fabric, after=clip_each), {"after": clip_each}),
    "load_state_dict after setup": (lambda fabric: usual(fabric, before=load), {"before": load}),
    "parameter replaced after setup": (
        lambda fabric: usual(fabric, before=replace_a_parameter),
        {"before": replace_a_parameter},
    ),
    "layer replaced after setup": (lambda fabric: usual(fabric, before=replace_a_layer), {"before": replace_a_layer}),
    "weights changed in place": (lambda fabric: usual(fabric, before=halve), {"before": halve}),
    "weights swapped on rank 0, and back": (swapped_on_rank_zero, {}),
    "weights loaded on rank 0, and broadcast by hand": (broadcast_by_hand, {"before": load}),
    "gradients averaged by hand": (averaged_by_hand, {}),
    "weights changed in forward": (changed_in_forward, {}),
    "embedding with max_norm": (renormalizing, {}),
    "frozen critic": (frozen_critic, {}),
    "gradient of the input": (gradient_of_the_input, {}),
    "optimizer from before setup, set up later": (early_optimizer_set_up_later, {}),
    "hooks from before setup": (hooks_before, {}),
    "hooks after setup": (lambda fabric: usual(fabric, before=hook_gradients), {"before": hook_gradients}),
    "weights clamped through .data": (lambda fabric: usual(fabric, before=clamp_data), {"before": clamp_data}),
    "weights assigned through .data": (lambda fabric: usual(fabric, before=assign_data), {"before": assign_data}),
    "rows of weights changed in place": (lambda fabric: usual(fabric, before=zero_a_row), {"before": zero_a_row}),
    "nn.init.eye_ after setup": (
        lambda fabric: usual(fabric, before=start_as_identity),
        {"before": start_as_identity},
    ),
    "functional_call with other weights": (other_weights, {}),
    "second derivatives": (second_derivatives, {}),
    "gradients of its own": (gradients_of_its_own, {}),
    "gradients of its own, averaged": (gradients_of_its_own_averaged, {}),
    "updates of its own": (updates_of_its_own, {}),
    "loss weighted by gradients": (weighted_by_gradients, {}),
    "steps within backward": (steps_within_backward, {}),
    "gradient penalty": (penalised, {}),
    "gradient penalty of the same forward": (penalised_once, {}),
    "output that is a view changed in place": (view_changed, {}),
    "layerwise optimizer": (partial(stepped_by, Layerwise), {}),
    "optimizer with the norm of all gradients": (partial(stepped_by, WithGlobalNorm), {}),
    "line search": (searched, {}),
    "closure called by the step": (closure_called, {}),
    "model called within vmap": (mapped, {}),
    "wrapped by hand": (wrapped_by_hand, {}),
    "lazy layers": (lazy, {}),
    "clip_grad_norm_ of the optimizer's groups": (partial(over_groups, after=clip), {"after": clip}),
    "weights of the optimizer's groups changed in place": (partial(over_groups, before=halve), {"before": halve}),
    "gradients read": (read_gradients, {}),
    "evaluation mode on rank 0": (evaluated_on_rank_zero, {}),
    "gradients changed in place": (lambda fabric: usual(fabric, after=halve_gradients), {"after": halve_gradients}),
}


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "functional_call with other weights": other_weights,
    "second derivatives": second_derivatives,
    "gradient penalty": penalised,
    "gradient penalty of the same forward": penalised_once,
    "output that is a view changed in place": view_changed,
    "updates of its own": descended,
    "weights changed in forward": changed_in_forward,
    "line search": searched,
    "closure called by the step": closure_called,
    "layerwise optimizer": partial(stepped_by, Layerwise),
    "optimizer with the norm of all gradients": partial(stepped_by, WithGlobalNorm),
}
"""Where the program in one process is another than that of `steps`."""


PROBE = torch.linspace(-1, 1, 8).view(2, 4)


@cache
def in_one_process(program: str) -> Tensor:
    """The output of the model that plain PyTorch trains."""
    net, changes = make_net(), PROGRAMS[program][1]
    plain = PLAIN.get(program) or partial(steps, net, make_optimizer(net), lambda loss: loss.backward(), **changes)
    output: Tensor = plain()(PROBE).detach()
    return output


def run_all(world: World, strategy: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """What becomes of each program on this rank: right, wrong by how much, or the sentence that it raises. Each has a
    fabric of its own, with which the last step is compared when it is closed. And what models that differ raise."""
    found = {}
    options: Any = {"accelerator": ACCELERATOR, "strategy": of_name(strategy), "launcher": "external"}
    for name, (program, _) in PROGRAMS.items():
        if strategy not in CORRECT.get(name, (strategy,)):
            continue
        expected = in_one_process(name)
        try:
            with Fabric(**options, sanitize="always") as fabric:
                fabric.launch()
                model = program(fabric)
                with torch.no_grad():
                    error = float((model(PROBE) - expected).abs().max())
            found[name] = "right" if error < 1e-5 else f"wrong by {error:.2g}"
        except (RuntimeError, ValueError, AssertionError, IndexError) as raised:
            found[name] = str(raised)
    if strategy == "manual":
        return found, {}
    with Fabric(**options) as fabric:
        fabric.launch()
        return found, set_up_different(fabric)


def of_name(name: str) -> Strategy:
    return (WITH_A_FUNCTION.get((name, 2)) or partial(make_strategy, name))()


def in_another_order(rank: int) -> nn.Module:
    names = ("first", "second")
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in (names if rank == 0 else reversed(names))})


def buffers_in_another_order(rank: int) -> nn.Module:
    model = nn.Linear(2, 2)
    for name in ("mean", "scale")[:: -1 if rank else 1]:
        model.register_buffer(name, torch.zeros(len(name)))
    return model


DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "sizes": (lambda rank: nn.Linear(2, 2 + rank), "      weight: float32 (3, 2)"),
    "names": (
        lambda rank: nn.ModuleDict({f"expert_{rank}": nn.Linear(2, 2)}),
        "      expert_{}.weight: float32 (2, 2)",
    ),
    "dtypes": (lambda rank: nn.Linear(2, 2, dtype=(torch.float32, torch.float64)[rank]), "      bias: float"),
    "frozen": (lambda rank: nn.Linear(2, 2).requires_grad_(rank == 0), "      weight: float32 (2, 2), frozen"),
    "order": (in_another_order, "made in the same order"),
    "order of buffers": (
        buffers_in_another_order,
        "   mean: float32 (4,), a buffer\n      scale: float32 (5,), a buffer\n      and 2 as on all ranks\n  rank 1: ",
    ),
    "buffers": (lambda rank: nn.BatchNorm1d(2, track_running_stats=rank == 0), "running_mean: float32 (2,), a buffer"),
}
"""Models that differ over the ranks, and a line of the error."""


def set_up_different(fabric: Fabric) -> dict[str, list[str]]:
    def set_up(name: str) -> None:
        with fabric.init_module() if name == "sizes" else nullcontext():  # where ZeRO-3 compares them
            model = DIFFERENT[name][0](fabric.global_rank)
        fabric.setup(model, make_optimizer(model))

    found = {}
    for name in DIFFERENT:
        with pytest.raises(CollectiveError) as raised:
            set_up(name)
        found[name] = fabric.collective.all_gather_object(str(raised.value))
    return found


META = ", on the meta device"


def set_up_with_values_on_rank_zero(fabric: Fabric) -> str:
    """What comes of a model that is on the meta device on other ranks: rank 0's weights, or an error."""
    with torch.device("meta" if fabric.global_rank else "cpu"):
        net = make_net()
    try:
        state = fabric.state_dict(fabric.setup_module(net))
    except CollectiveError as error:
        return str(error)
    expected = make_net().state_dict() if fabric.is_global_zero else {}
    return "right" if all(torch.equal(state[name], expected[name]) for name in expected) else "wrong"


CORRECT = {
    "weights swapped on rank 0, and back": (
        *("ddp", "manual", "ddp_sharded", "fsdp", "model_parallel", "deepspeed_stage_1", "deepspeed_stage_2"),
    ),
    "weights loaded on rank 0, and broadcast by hand": (
        *("ddp", "manual", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2"),
    ),
    "frozen critic": (
        "ddp",
        "fsdp",
        "model_parallel",
        "manual",
        "ddp_sharded",
        "ddp_fully_sharded",
        "deepspeed_stage_1",
        "deepspeed_stage_2",
        "deepspeed_stage_3",
    ),
    "gradient of the input": ("ddp", "fsdp", "ddp_fully_sharded", "deepspeed_stage_2"),
}
"""Programs that look like a mistake, and the strategies under which they are right: nothing may raise."""

KEEPS_WHOLE_WEIGHTS = ("ddp", "manual", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2")

RIGHT: dict[str, tuple[str, ...]] = {
    "second derivatives": ("ddp",),
    "gradients of its own, averaged": ("ddp",),
    "gradient penalty": ("ddp", "fsdp", "model_parallel", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_1"),
    "gradient penalty of the same forward": ("ddp", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2"),
    "loss weighted by gradients": (
        *("ddp", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_1", "deepspeed_stage_2"),
    ),
    "layerwise optimizer": ("ddp", "fsdp", "model_parallel", "manual", "ddp_sharded"),
    "optimizer with the norm of all gradients": ("ddp", "fsdp", "model_parallel", "manual"),
    "line search": ("ddp", "manual"),
    "clip_grad_norm_ of the optimizer's groups": ("ddp", "fsdp", "model_parallel", "manual"),
    "weights of the optimizer's groups changed in place": (
        *("ddp", "fsdp", "model_parallel", "manual", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2"),
    ),
    "steps within backward": ("fsdp", "model_parallel"),
    "gradients read": ("ddp", "fsdp", "model_parallel", "manual"),
    "rows of weights changed in place": ("ddp", "manual"),
    "weights changed in forward": KEEPS_WHOLE_WEIGHTS,
    "closure called by the step": ("ddp", "fsdp", "model_parallel", "manual", "ddp_sharded", "ddp_fully_sharded"),
    "model called within vmap": ("ddp", "fsdp", "model_parallel", "manual", "ddp_sharded"),
    "forward called as a method": (*KEEPS_WHOLE_WEIGHTS, "ddp_fully_sharded"),
}
"""Programs that are right under these strategies, and raise under others."""

NOT_FOUND: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fsdp", "model_parallel"), ("weights assigned through .data",)),
    "ddp_fully_sharded": ("rows of weights changed in place",),
}
"""Programs that are wrong under these strategies, and that nothing finds."""

FOLLOWED = (
    "load_state_dict after setup",
    "weights changed in place",
    "weights clamped through .data",
    "weights assigned through .data",
    "nn.init.eye_ after setup",
)
"""What trains on from the changed weights, where ranks have whole weights."""
SENTENCES = {
    (
        "ddp_fully_sharded",
        "group of parameters added to the optimizer",
    ): "the gradient of parameter 4 on rank 1 differs",
    **dict.fromkeys(
        ((name, "evaluation mode on rank 0") for name in ("ddp", "fsdp", "manual", "ddp_sharded", "deepspeed_stage_2")),
        "(1 of 1 on rank 1, 0 of 1 on rank 0). It is the first comparison. Call `model.train()` and `model.eval()`",
    ),
    **dict.fromkeys(
        ((name, "weights changed in forward") for name in ("fsdp", "ddp_fully_sharded")),
        "ended with values of `key.0.weight` that differ from its parameter",
    ),
    ("fsdp", "parameter replaced after setup"): "ended with values of `2.weight` that differ from its parameter",
    ("fsdp", "hooks after setup"): "has a hook by `register_hook`, which runs in no backward",
    ("model_parallel", "functional_call with other weights"): "ended with values of `",
    ("fsdp", "second derivatives"): "appears to not have been used in the graph",
    ("fsdp", "updates of its own"): "appears to not have been used in the graph",
    ("fsdp", "forward called as a method"): "got mixed torch.Tensor and DTensor",
    ("ddp", "submodules called by themselves"): "were not averaged over the ranks",
    ("ddp", "never synchronised"): "`SGD.step()` after a `fabric.backward` that did not synchronise",
    (
        "deepspeed_stage_3",
        "weights changed in place",
    ): "was changed in place, but at ZeRO stage 3 a weight has no values",
    ("deepspeed_stage_3", "nn.init.eye_ after setup"): "Only tensors with 2 dimensions are supported",
    ("ddp", "lazy layers"): "2 tensors of `Sequential` ('0.weight', '0.bias') have no shape yet",
    (
        "ddp_sharded",
        "wrapped by hand",
    ): "The model is wrapped in `DistributedDataParallel`, and `strategy='ddp_sharded'`",
    ("ddp_fully_sharded", "wrapped by hand"): "Pass the module to `fabric.setup` as it is, not wrapped",
    ("deepspeed_stage_2", "closure called by the step"): "`CallsClosure.step` calls its closure itself, and under",
    ("ddp", "embedding with max_norm"): "`0.weight` on rank 1 differs from that on rank 0",
    (
        "ddp",
        "gradients of its own",
    ): "After step 1 of `SGD`, the gradient of `0.weight` on rank 1 differs from that on rank 0. It is the first",
    ("ddp", "updates of its own"): "`0.weight` on rank 1 differs from that on rank 0. It is the first comparison",
    (
        "manual",
        "gradients of its own",
    ): "After step 1 of `SGD`, the gradient of `0.weight` on rank 1 differs from that on rank 0. It is the first",
    ("manual", "updates of its own"): "`0.weight` on rank 1 differs from that on rank 0. It is the first comparison",
    ("ddp_sharded", "updates of its own"): "`0.weight` on rank 1 differs from that on rank 0. It is the first",
    ("manual", "steps within backward"): "`SGD.step()` within a backward, in a hook of a parameter",
    ("ddp", "steps within backward"): "`SGD.step()` within a backward, in a hook of a parameter",
    ("ddp_fully_sharded", "steps within backward"): "its gradient is averaged over the ranks later",
    ("fsdp", "gradient penalty of the same forward"): "run a forward of its own for it",
    **dict.fromkeys(
        (
            (name, "output that is a view changed in place")
            for name in ("fsdp", "model_parallel", "deepspeed_stage_1", "deepspeed_stage_2")
        ),
        "write `logits = logits / 2`",
    ),
    ("deepspeed_stage_2", "layerwise optimizer"): "`Layerwise` in `setup` uses whole tensors, but ZeRO passes",
    ("ddp_fully_sharded", "layerwise optimizer"): "cannot run `Layerwise`: each rank has a part of the gradients",
    (
        "ddp_sharded",
        "optimizer with the norm of all gradients",
    ): "`WithGlobalNorm` is not known to compute the update of each",
    ("ddp_fully_sharded", "gradients read"): "each rank has a shard of each gradient",
    ("deepspeed_stage_1", "gradients read"): "of a gradient that DeepSpeed keeps, in shards or not averaged yet",
    ("fsdp", "never synchronised"): "`SGD.step()` after a `fabric.backward` that did not synchronise",
    ("fsdp", "optimizer from before setup"): "has replaced the parameters of `FSDPSequential`",
    ("model_parallel", "layer replaced after setup"): "'2.weight', '2.bias'. Add and replace layers before `setup`",
    ("ddp_sharded", "parameter replaced after setup"): "`Sequential` ('2.weight') were added or unfrozen after",
    ("ddp_fully_sharded", "parameter replaced after setup"): "`Sequential` ('2.weight') were added or unfrozen after",
    ("deepspeed_stage_2", "parameter replaced after setup"): "`Sequential` ('2.weight') were added or unfrozen after",
    ("deepspeed_stage_2", "layer replaced after setup"): "`Sequential` ('2.weight', '2.bias') were added or unfrozen",
    ("fsdp", "optimizer from before setup, set up later"): "was made before `fabric.setup` of `FSDPSequential`",
    ("fsdp", "hooks from before setup"): "are sharded: '0.weight', '0.bias', '2.weight', '2.bias'",
    ("manual", "plain backward"): "is averaged over the ranks after `fabric.backward(loss)`",
    ("ddp_sharded", "optimizer from before setup, plain backward"): "that was not set up",
    ("deepspeed_stage_1", "clip_grad_norm_ of torch"): "call `fabric.clip_gradients(model, optimizer, max_norm=...)`",
    ("ddp_sharded", "clip_grad_norm_ of torch"): "call `fabric.clip_gradients(model, optimizer, max_norm=...)`",
    ("ddp_sharded", "gradients read"): "under `strategy='ddp_sharded'` the averaged gradient is on that rank alone",
    ("ddp_fully_sharded", "clip_grad_norm_ of torch"): "call `fabric.clip_gradients(model, optimizer, max_norm=...)`",
    ("deepspeed_stage_2", "plain backward"): "`loss.backward()` was called on a loss of `Sequential`, but DeepSpeed",
    ("deepspeed_stage_2", "submodules called by themselves"): "a submodule was called directly",
    ("deepspeed_stage_2", "optimizer that was not set up"): "`Sequential` was set up without an optimizer, for",
    ("deepspeed_stage_2", "weights assigned through .data"): "values into that tensor: `parameter.data.copy_(values)`",
    ("deepspeed_stage_3", "parameter replaced after setup"): "`Sequential` ('2.weight') were added or unfrozen after",
}
NAMES = ("ddp", "fsdp", "model_parallel", "manual", "ddp_sharded", "ddp_fully_sharded")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "names",
    [
        (*NAMES, "deepspeed_stage_2"),
        pytest.param(("deepspeed_stage_1", "deepspeed_stage_3"), marks=pytest.mark.thorough),
    ],
    ids=", ".join,
)
def test_a_program_with_a_mistake_raises_or_trains_as_it_would_in_one_process(names: tuple[str, ...]) -> None:
    for name, (first, second) in zip(names, run_each(2, run_all, [(name,) for name in names]), strict=True):
        found = {
            program: word
            if word.startswith(("right", "wrong")) == other.startswith(("right", "wrong"))
            else "wrong alone"
            for (program, word), other in zip(first[0].items(), second[0].values(), strict=True)
        }
        right = [program for program, strategies in RIGHT.items() if name in strategies]
        followed = FOLLOWED[: 4 if name in ("ddp", "manual") else 3]  # backends write into the memory that they know
        for program in ("no mistake", *CORRECT, *right, *(followed if name in KEEPS_WHOLE_WEIGHTS else ())):
            assert found.get(program, "right") == "right", (name, program)
        wrong = {program for program, word in found.items() if word.startswith("wrong")}
        assert wrong == set(NOT_FOUND.get(name, ())), (name, found)
        for (strategy_name, program), sentence in SENTENCES.items():
            if strategy_name == name:
                assert sentence in found[program], (name, program)
        assert bool(first[1]) == (name != "manual")
        for kind, sentences in first[1].items():
            for rank, words in enumerate(sentences):
                assert words == sentences[0], "each rank's line of the program is in the error of every rank"
                assert re.search("rank 1: (setup|construction) of `", words), (name, kind)
                assert DIFFERENT[kind][1].format(rank) in words, (name, kind)


@pytest.mark.slow
def test_values_on_rank_zero_alone_are_those_of_all_shards_or_raise() -> None:
    expected = {"fsdp": "right", "model_parallel": META, "ddp": META, "ddp_sharded": META}
    found = launch_each(2, set_up_with_values_on_rank_zero, [(of_name(name),) for name in expected])
    for (name, word), said in zip(expected.items(), found, strict=True):
        assert word in said, name


def train_a_second_model(fabric: Fabric, average: bool) -> list[str]:
    """Train a model, one that was not set up, one with an inner loop of its own, and one that is set up later."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fabric").addHandler(handler)
    net, forgotten, inner, late = make_net(), nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, make_optimizer(net))
    optimizers = [make_optimizer(forgotten), make_optimizer(inner), make_optimizer(late)]
    late(torch.ones(1, 1)).sum().backward()
    optimizers[2].step()
    for step in range(4):
        if step == 1:
            fabric.setup(late, optimizers[2])
        inner(torch.ones(1, 1)).square().sum().backward()
        optimizers[1].step()
        fabric.backward(loss_of(model, step) + forgotten(torch.ones(1, 1)).square().sum())
        if average:
            fabric.average_gradients(forgotten.parameters())
        optimizer.step()
        optimizers[0].step()
        for each in (optimizer, *optimizers):
            each.zero_grad()
    logging.getLogger("fabric").removeHandler(handler)
    return heard


@pytest.mark.slow
def test_a_second_model_that_was_not_set_up_is_reported_once_unless_the_program_averages_it() -> None:
    calls = [("ddp", False), ("fsdp", False), ("ddp", True)]
    for (name, average), heard in zip(calls, launch_each(2, train_a_second_model, calls), strict=True):
        told = [each for each in heard if "was not set up" in each]
        assert len(told) == (not average), (name, told)
        assert all("for 2 parameters of no model" in each for each in told), (name, told)
