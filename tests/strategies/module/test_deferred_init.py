"""A model that was made without values raises at its first forward until something has written them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric


class Words(nn.Module):
    """An embedding whose padding row is written when it is made, a layer, and what has values from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.gain * self.out(self.norm(self.embed(tokens).mean(dim=1)))
        return x


EMPTY = (
    r"`Words` was made empty, and embed.weight, out.weight, out.bias have no values yet. Load a checkpoint "
    r"\(`fabric.load`\) before the first forward, or give the module that has them a `reset_parameters` without "
    r"arguments, or construct the model without `empty_init=True`."
)


def trained(fabric: Fabric, fill: Callable[[nn.Module], object], later: Callable[[nn.Module], object]) -> nn.Module:
    """One step of a model that was made empty, filled before `setup` or after it."""
    with fabric.init_module(empty_init=True):
        net = Words()
    fill(net)
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    later(model)
    fabric.backward(model(torch.ones(2, 3, dtype=torch.long)).sum())
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    return net


def nothing(_: nn.Module) -> None:
    pass


def loaded(net: nn.Module) -> None:
    net.load_state_dict(Words().state_dict())


def assigned(net: nn.Module) -> None:
    net.load_state_dict(Words().state_dict(), assign=True)


def reset(net: nn.Module) -> None:
    for part in net.modules():
        getattr(part, "reset_parameters", lambda: None)()


def past_autograd(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.fill_(0.5)  # which no version counter sees


def to_zeros(net: nn.Module) -> None:
    for parameter in net.parameters():
        nn.init.zeros_(parameter)


@pytest.mark.parametrize("write", [loaded, assigned, reset, past_autograd, to_zeros])
@pytest.mark.parametrize("is_later", [False, True], ids=["before setup", "after setup"])
def test_a_model_that_was_made_empty_trains_however_it_was_filled(
    write: Callable[[nn.Module], None], is_later: bool
) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, strategy="single_device") as fabric:
        net = trained(fabric, nothing, write) if is_later else trained(fabric, write, nothing)
        assert not any(vars(parameter) for parameter in net.parameters())


def test_a_tensor_that_was_never_initialised_is_named_also_if_it_is_frozen() -> None:
    def all_but_one(net: nn.Module) -> None:
        state = Words().state_dict()
        del state["out.weight"]
        net.load_state_dict(state, strict=False)
        net.requires_grad_(False)

    with (
        Fabric(accelerator=ACCELERATOR, devices=1, strategy="single_device") as fabric,
        pytest.raises(RuntimeError, match=r"`Words` was made empty, and out.weight has no values yet."),
    ):
        trained(fabric, all_but_one, nothing)


def refused(fabric: Fabric) -> None:
    with pytest.raises(RuntimeError, match=EMPTY):
        trained(fabric, nothing, nothing)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_2"])
def test_a_model_that_nothing_filled_raises_with_its_names_on_every_rank(strategy: str) -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver").launch(refused)
