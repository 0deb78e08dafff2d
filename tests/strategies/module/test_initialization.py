"""A model that was made without values: what nothing has loaded is initialised by its modules, or raises by name."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD

from fabric import Fabric


class Bare(nn.Module):
    """It initialises a parameter when it is made, and has no method that does so again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        nn.init.normal_(self.weight)


class Words(nn.Module):
    """An embedding whose padding row is written when it is made, a layer, and what has values from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)
        self.bare = Bare()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.gain * self.out(self.norm(self.embed(tokens).mean(dim=1))) + self.bare.weight
        return x


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
    nn.init.ones_(net.bare.weight)  # type: ignore[union-attr, arg-type]


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


def all_but_one(net: nn.Module) -> None:
    state = Words().state_dict()
    del state["bare.weight"]
    net.load_state_dict(state, strict=False)


@pytest.mark.parametrize("fill", [nothing, all_but_one])
def test_a_parameter_that_nothing_filled_is_initialised_as_when_it_was_made(fill: Callable[[nn.Module], None]) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, strategy="single_device") as fabric:
        net = trained(fabric, fill, nothing)
        assert bool(net.bare.weight.any())  # type: ignore[union-attr, operator]


class Twice(nn.Module):
    """Layers that are copied, as those of `nn.TransformerEncoder`: copies have no attributes of parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.second = layer, deepcopy(layer)


def test_copies_are_initialised_or_named() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, strategy="single_device") as fabric:
        with fabric.init_module(empty_init=True):
            layers, bare = Twice(nn.Linear(3, 3)), Twice(Bare())
        fabric.setup_module(layers)
        assert all(parameter.isfinite().all() for parameter in layers.parameters())
        with pytest.raises(
            RuntimeError,
            match=r"`Twice` was made empty, and second.weight has no values yet. Load a checkpoint \(`fabric.load`\) "
            r"before the first forward, or give the module that has them a `reset_parameters` without arguments, or "
            r"construct the model without `empty_init=True`.",
        ):
            fabric.setup_module(bare)


class Adapted(nn.Linear):
    """LoRA with parameters of its own beside the weight, as litgpt has it."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.lora_a = nn.Parameter(torch.empty(2, 6))
        self.lora_b = nn.Parameter(torch.empty(6, 2))
        self.reset_adapter()

    def reset_adapter(self) -> None:
        nn.init.kaiming_uniform_(self.lora_a)
        nn.init.zeros_(self.lora_b)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "lora_a"):  # not yet within `nn.Linear.__init__`
            self.reset_adapter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


class WithAdapters(nn.Module):
    """Both kinds: parameters beside the weight, and submodules beside the layer, initialised once more, as by peft."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Adapted(), Adapted()])
        self.lora_down, self.lora_up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.last = nn.Linear(6, 6)
        self.reset_adapters()

    def reset_adapters(self) -> None:
        nn.init.normal_(self.lora_down.weight, std=0.5)
        nn.init.zeros_(self.lora_up.weight)
        nn.init.ones_(self.last.weight)
        nn.init.constant_(self.last.bias, 0.25)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x + self.lora_up(self.lora_down(x)))  # type: ignore[no-any-return]


def base_state() -> dict[str, Tensor]:
    """What the checkpoint holds: all but the adapters."""
    torch.manual_seed(11)
    return {
        name: tensor
        for name, tensor in WithAdapters().state_dict().items()
        if "lora" not in name and "last" not in name
    }


def fine_tuned(fabric: Fabric, path: str, is_loaded_before: bool) -> dict[str, Tensor]:
    torch.manual_seed(5 if fabric.is_global_zero else 6)
    with fabric.init_module(empty_init=True):
        net = WithAdapters()
    if is_loaded_before:
        net.load_state_dict(torch.load(path), strict=False)
    model, _ = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    if not is_loaded_before:
        fabric.load_raw(path, model, strict=False)
    assert bool(model(torch.ones(2, 3, dtype=torch.long)).isfinite().all())
    return fabric.state_dict(model)


def expected_adapters() -> dict[str, Tensor]:
    """All of plain PyTorch's draws, with what the checkpoint holds loaded over them."""
    net = WithAdapters()
    torch.manual_seed(5)
    net.apply(lambda part: getattr(part, "reset_parameters", lambda: None)())
    net.reset_adapters()
    net.load_state_dict(base_state(), strict=False)
    return net.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "ddp_sharded", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_what_a_checkpoint_does_not_hold_is_initialised_alike_under_every_strategy(
    strategy: str, tmp_path: Path
) -> None:
    torch.save(base_state(), tmp_path / "base.pt")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, launcher="forkserver")
    found = fabric.launch(fine_tuned, str(tmp_path / "base.pt"), False)
    torch.testing.assert_close(found, dict(expected_adapters()), rtol=0, atol=0)


def test_what_was_loaded_before_setup_stays_and_the_rest_is_initialised(tmp_path: Path) -> None:
    torch.save(base_state(), tmp_path / "base.pt")
    with Fabric(accelerator="cpu", devices=1, strategy="single_device") as fabric:
        found = fine_tuned(fabric, str(tmp_path / "base.pt"), True)
    base = base_state()
    for name, tensor in found.items():
        if name in base:
            assert torch.equal(tensor, base[name]), name
        else:
            assert bool(tensor.isfinite().all()), name
            assert bool(tensor.any()) == (name not in ("blocks.0.lora_b", "blocks.1.lora_b", "lora_up.weight")), name
