"""Tensors in objects that a forward returns: that they are found, and that a backend can replace them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from fabric import Fabric
from fabric.strategies import DDPStrategy, FSDPStrategy, Strategy
from fabric.strategies.module.output_tensors import (
    OutputWithTensors,
    list_hidden_tensors,
    replace_tensors,
    restore_output,
    tensors_requiring_grad,
)


class Linked:
    """An object that refers to itself, to a module and to a function."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.me, self.module, self.function = value, self, nn.Linear(1, 1), lambda: value


class Slots:
    """An object without `__dict__`."""

    __slots__ = ("__value", "missing")

    def __init__(self, value: Tensor) -> None:
        self.__value = value

    @property
    def value(self) -> Tensor:
        return self.__value


class Keys(dict[str, Tensor]):
    """Its keys are its attributes."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value=value)
        self.__dict__ = self


class Named(list[int]):
    """A list with an attribute."""

    def __init__(self, value: Tensor) -> None:
        super().__init__([1])
        self.value = value


WAYS: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda each: SimpleNamespace(first=[each], second={"again": each}), lambda output: output.first[0]),
    (lambda each: UserDict(value=each), lambda output: output["value"]),
    (Linked, lambda output: output.value),
    (Slots, lambda output: output.value),
    (Named, lambda output: output.value),
    (lambda each: (each.detach(), Independent(Normal(each, 1.0), 1)), lambda output: output[1].mean),
]


@pytest.mark.parametrize(
    ("make", "read"), WAYS, ids=["attributes", "mapping", "linked", "slots", "list", "distribution"]
)
def test_tensors_of_an_object_are_found_and_replaced(
    make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    value = torch.ones(2, requires_grad=True) * 2
    output = make(value)
    assert [each is value for each in tensors_requiring_grad(output)] == [True] or read(output)._base is value
    exposed = list_hidden_tensors(output)
    assert isinstance(exposed, OutputWithTensors)
    other = [each + 5 for each in exposed.tensors]
    assert read(restore_output(exposed._replace(tensors=other))).tolist() == [7.0, 7.0]


def test_a_dictionary_whose_keys_are_its_attributes_is_so_afterwards() -> None:
    before = Keys(torch.ones(2))
    after = replace_tensors(before, lambda tensor: tensor + 1)
    assert before.value.tolist() == [1.0, 1.0]
    assert after.value is after["value"]
    assert after.value.tolist() == [2.0, 2.0]


def test_an_object_that_the_model_may_keep_is_not_changed() -> None:
    kept = Linked(torch.ones(2))
    output = replace_tensors(kept, lambda tensor: tensor + 1)
    assert kept.value.tolist() == [1.0, 1.0]
    assert output.value.tolist() == [2.0, 2.0]
    assert output.me is output
    assert output.module is kept.module


def test_an_object_without_tensors_is_itself_afterwards() -> None:
    output = SimpleNamespace(number=1, inner=SimpleNamespace())
    assert replace_tensors(output, lambda tensor: tensor + 1) is output


def test_a_long_chain_of_objects_is_searched_from_its_start() -> None:
    chain = SimpleNamespace(next=None)
    for _ in range(10_000):
        chain = SimpleNamespace(next=chain)
    value = torch.ones(1, requires_grad=True) * 2
    exposed = list_hidden_tensors(SimpleNamespace(value=value, chain=chain))
    assert [each is value for each in exposed.tensors] == [True]
    assert restore_output(exposed._replace(tensors=[value + 1])).value.item() == 3.0


def test_a_list_that_an_object_has_twice_is_one_list_afterwards() -> None:
    several = [torch.ones(2, requires_grad=True) * 2]
    exposed = list_hidden_tensors(SimpleNamespace(first=several, second=several))
    output = restore_output(exposed._replace(tensors=[each + 5 for each in exposed.tensors]))
    assert output.first is output.second
    assert output.first[0].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("output", [torch.ones(1, requires_grad=True), {"a": (torch.ones(1, requires_grad=True),)}, 3])
def test_what_torch_finds_stays_as_it_is(output: Any) -> None:
    assert list_hidden_tensors(output) is output
    assert restore_output(output) is output


class Actor(nn.Module):
    """Returns a distribution to the model that contains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Normal:
        hidden = self.second(self.first(inputs).tanh())
        return Normal(hidden, hidden.exp())


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Actor(), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> tuple[Normal, Tensor]:
        return self.actor(inputs), self.critic(inputs)


def train(fabric: Fabric) -> list[float]:
    torch.manual_seed(0)
    model = ActorCritic()
    hooked: list[type] = []
    for part in (model, model.actor):  # before `setup`, and so before the hooks of a backend
        part.register_forward_hook(lambda part, args, output: hooked.append(type(output)))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(4):
        inputs = torch.arange(16.0).view(4, 4)[fabric.global_rank :: fabric.world_size].sin() + step
        actions, value = model(inputs)
        loss = -actions.log_prob(inputs).mean() + value.square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    assert hooked == [Normal, tuple] * 4
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(auto_wrap_policy={Actor}, reshard_after_forward=True),
        DDPStrategy(find_unused_parameters=True),
        "deepspeed_stage_3",
        "ddp_fully_sharded",
    ],
    ids=["fsdp", "find_unused", "deepspeed_stage_3", "ddp_fully_sharded"],
)
def test_an_actor_and_a_critic_train_as_in_one_process(strategy: Strategy | str) -> None:
    expected = Fabric(accelerator=ACCELERATOR, devices=1).launch(train)
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    assert fabric.launch(train) == pytest.approx(expected, rel=1e-5)


class Deferred(nn.Linear):
    """Returns a function, in which no tensor can be found."""

    def forward(self, inputs: Tensor) -> Callable[[], Tensor]:  # type: ignore[override]
        output = super().forward(inputs)
        return lambda: output


def train_deferred(fabric: Fabric) -> str:
    model: Any = Deferred(3, 3)
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as caught:
        fabric.backward(model(torch.ones(1, 3))().sum())
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("fsdp", "not a function or a generator that has them"),
        ("ddp_fully_sharded", "must match the size"),  # of a shard
    ],
)
def test_a_function_that_has_the_output_is_refused_in_backward(strategy: str, words: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")
    message = fabric.launch(train_deferred)
    assert message is not None
    assert words in message


class InSlots(nn.Linear):
    """Returns an object with `__slots__`."""

    def forward(self, inputs: Tensor) -> Slots:  # type: ignore[override]
        return Slots(super().forward(inputs))


def forward_in_slots(fabric: Fabric) -> str:
    model: Any = InSlots(3, 3)
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


@pytest.mark.slow
def test_an_output_in_which_deepspeed_finds_nothing_is_refused_at_stage_3() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="deepspeed_stage_3", launcher="forkserver")
    assert "hooks at stage 3 cannot search for parameters" in (fabric.launch(forward_in_slots) or "")
