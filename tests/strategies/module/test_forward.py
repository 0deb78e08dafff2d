"""The user's own module stays itself, prepared and copied."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fabric.strategies.module.forward import ForwardPath


class Net(nn.Module):
    """A model with a second method that computes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


class Recorder:
    """Counts how often the strategy's part ran."""

    def __init__(self) -> None:
        self.num_runs = 0

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_runs += 1
        return function(*args, **kwargs)


def test_forward_runs_the_strategys_part_and_the_users_hooks_once() -> None:
    net, around, calls = Net(), Recorder(), []
    net.register_forward_hook(lambda *args: calls.append("hook"))
    ForwardPath(net, around)
    x = torch.ones(1, 2)
    torch.testing.assert_close(net(x), net.linear(x))
    assert (around.num_runs, calls) == (1, ["hook"])


def test_the_module_keeps_its_class_its_names_and_its_signature() -> None:
    net = Net()
    ForwardPath(net, Recorder())
    assert type(net) is Net
    assert list(net.state_dict()) == ["linear.weight", "linear.bias"] == [name for name, _ in net.named_parameters()]
    assert inspect.signature(net.forward) == inspect.signature(Net().forward)


def test_a_marked_method_runs_the_strategys_part_once_even_where_it_calls_forward() -> None:
    net, around = Net(), Recorder()
    ForwardPath(net, around)
    net.loss(torch.ones(1, 2))
    assert around.num_runs == 1  # by forward, which it calls
    net.mark_forward_method("loss")
    net.mark_forward_method(net.loss)  # again, and by the method itself
    net.loss(torch.ones(1, 2))
    assert around.num_runs == 2


def test_marking_a_method_that_is_not_there_names_it() -> None:
    net = Net()
    ForwardPath(net, Recorder())
    with pytest.raises(AttributeError, match="`Net` has no method `generate`"):
        net.mark_forward_method("generate")


def test_release_restores_the_module() -> None:
    net = Net()
    before = set(vars(net))
    path = ForwardPath(net, Recorder())
    path("loss")
    path.release()
    assert set(vars(net)) == before


def test_a_module_is_prepared_once() -> None:
    net = Net()
    ForwardPath(net, None)
    with pytest.raises(ValueError, match="Set a module up once"):
        ForwardPath(net, None)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_of_a_prepared_module_are_plain_modules(duplicate: Callable[[nn.Module], Any]) -> None:
    net, around = Net(), Recorder()
    ForwardPath(net, around)("loss")
    other = duplicate(net)
    with torch.no_grad():
        other.linear.weight.zero_()
        other.linear.bias.fill_(1)
    assert other.loss(torch.ones(1, 2)).item() == 2.0  # its own weights, not those of the original
    assert around.num_runs == 0
    with pytest.raises(RuntimeError, match="a copy is a plain module"):
        other.mark_forward_method("loss")


def test_an_exception_in_forward_leaves_the_module_ready_for_the_next_call() -> None:
    net, around = Net(), Recorder()
    ForwardPath(net, around)
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 3))
    net(torch.ones(1, 2))
    assert around.num_runs == 2


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after", "in place before", "in place after"])
def test_compiled_before_or_after_it_computes_the_same(order: str) -> None:
    net, around, x = Net(), Recorder(), torch.randn(3, 2)
    expected = net(x)
    called: Any = net
    if order == "before":
        called = torch.compile(net, backend="aot_eager")
    if order == "in place before":
        net.compile(backend="aot_eager")
    ForwardPath(called, around)
    if order == "after":
        called = torch.compile(net, backend="aot_eager")
    if order == "in place after":
        net.compile(backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(called(x), expected)
    assert around.num_runs == 2
    called(x).sum().backward()
    assert net.linear.weight.grad is not None
