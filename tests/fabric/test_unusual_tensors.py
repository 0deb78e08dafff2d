"""Nested tensors, tensors that have several elements in one memory location, and parameters of one memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from fabric import Fabric


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def strided(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts)


PARTS = [torch.full((2 + number % 2, 4), number / 8) for number in range(8)]
WRONG: dict[str, tuple[Callable[[], Tensor], str]] = {
    "jagged": (lambda: jagged(PARTS), "('extra') are nested tensors, which ranks cannot send"),
    "strided": (lambda: strided(PARTS), "`nested.values()` and `nested.offsets()`"),
    "expanded": (
        lambda: torch.zeros(1).expand(4),
        "1 tensors of `Linear` ('extra') have several elements in one memory",
    ),
}


def sentence(function: Callable[..., Any], *args: Any) -> str:
    try:
        return f"no error: {function(*args)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def try_all(fabric: Fabric) -> dict[str, str]:
    """The errors of models and collectives with such tensors."""
    found = {}
    for name, (make, _) in WRONG.items():
        for is_parameter in (False, True):
            model = nn.Linear(4, 2)
            extra = nn.Parameter(make()) if is_parameter else nn.Buffer(make())
            model.register_parameter("extra", extra) if is_parameter else model.register_buffer("extra", extra)
            found[f"{name}, {is_parameter}"] = sentence(fabric.setup_module, model)
    found["gathered, jagged"] = sentence(fabric.all_gather, jagged(PARTS))
    found["gathered, strided"] = sentence(fabric.all_gather, {"x": strided(PARTS)})
    found["reduced, strided"] = sentence(fabric.all_reduce, strided(PARTS))
    return found


def train_on_nested(fabric: Fabric) -> list[Tensor]:
    """The weights after an epoch of nested batches of each layout, compared in each step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model.register_buffer("positions", torch.arange(4).expand(1, -1))  # one row: no element twice
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    for collate in (jagged, strided):
        loader = fabric.setup_dataloaders(DataLoader(PARTS, 4 // fabric.world_size, collate_fn=collate))  # type: ignore[arg-type]
        for batch in loader:
            rows = model(batch).unbind()
            fabric.backward(sum(row.square().mean() for row in rows), weight=float(len(rows)))
            optimizer.step()
            optimizer.zero_grad()
    return list(fabric.state_dict(model, all_ranks=True).values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_batches_train_as_in_one_process_and_nested_or_expanded_tensors_of_a_model_are_refused() -> None:
    for name in ("ddp", "fsdp"):
        fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=name, launcher="forkserver", sanitize="always")
        found = fabric.launch(try_all)
        for kind, (_, words) in WRONG.items():
            assert words in found[f"{kind}, True"], found
            assert words in found[f"{kind}, False"], found
        for call in ("gathered, jagged", "gathered, strided", "reduced, strided"):
            assert "`.values()` and `.offsets()` of a nested one" in found[call]
        fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=name, launcher="forkserver", sanitize="always")
        with Fabric(accelerator=ACCELERATOR, devices=1) as alone:
            torch.testing.assert_close(fabric.launch(train_on_nested), train_on_nested(alone))


def evaluate_encoders(fabric: Fabric) -> list[str]:
    """Forwards of encoders that make nested tensors in evaluation, and of one that does not."""

    def evaluate(enable_nested_tensor: bool) -> torch.Size:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=enable_nested_tensor)
        model, _ = fabric.setup(encoder, SGD(encoder.parameters(), lr=0.1))
        model.eval()
        mask = torch.tensor([[False, False, True], [False, True, True]], device=fabric.device)
        with torch.no_grad():
            return model(torch.ones(2, 3, 8, device=fabric.device), src_key_padding_mask=mask).shape

    return [sentence(evaluate, True), sentence(evaluate, False)]


@pytest.mark.slow
def test_nested_tensors_within_a_model_at_stage_3_say_what_to_write() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="deepspeed_stage_3", launcher="forkserver")
    enabled, disabled = fabric.launch(evaluate_encoders)
    assert "Write `nn.TransformerEncoder(..., enable_nested_tensor=False)`" in enabled
    assert disabled == "no error: torch.Size([2, 3, 8])"


def share(fabric: Fabric, how: str) -> list[Tensor] | str:
    """Two models with one weight, or with one submodule, trained by one loss; or frozen, in the second alone."""
    torch.manual_seed(0)
    one, two = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    one.requires_grad_(how != "frozen")
    if how == "submodule":
        two[0] = one[0]
    else:
        two[0].weight = one[0].weight
    known = set(one.parameters())
    trained = [each for each in two.parameters() if each not in known]
    x = torch.arange(16.0, device=fabric.device).view(4, 4).sin()[fabric.global_rank :: fabric.world_size]
    optimizers = []
    try:
        if how == "frozen":
            first = fabric.setup_module(one)
        else:
            first, optimizer = fabric.setup(one, SGD(one.parameters(), lr=0.1))
            optimizers.append(optimizer)
        second, optimizer = fabric.setup(two, SGD(trained, lr=0.1))
        optimizers.append(optimizer)
        for _ in range(2):
            fabric.backward(first(x).square().mean() + second(x).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    states = [fabric.state_dict(model, all_ranks=True) for model in (first, second)]
    return [value for state in states for value in state.values()]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["weight", "submodule", "frozen"])
def test_a_parameter_of_two_models_is_one_or_refused(how: str) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1) as alone:
        expected = share(alone, how)
    for name in ("ddp", "ddp_sharded", "fsdp", "ddp_fully_sharded", "deepspeed_stage_3"):
        found = Fabric(accelerator=ACCELERATOR, devices=2, strategy=name, launcher="forkserver").launch(share, how)
        if name in ("ddp_fully_sharded", "deepspeed_stage_3") or (name == "fsdp" and how != "frozen"):
            assert "'0.weight' of `Sequential` is also a parameter of `" in found
            assert "Set up one module that has both, or pass `strategy='ddp'`" in found
        else:
            assert not isinstance(found, str), (name, found)
            torch.testing.assert_close(found, expected)


class OneMemory(nn.Module):
    """Two parameters, or a parameter and a buffer, in one storage."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(4, 8)
        self.down = nn.Parameter(weight[:, :4])
        other = {"apart": weight[:, 4:], "transposed": weight[:, :4].t(), "buffer": weight[:, 2:6]}[how]
        self.up = nn.Buffer(other) if how == "buffer" else nn.Parameter(other)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.down).tanh() @ self.up


def train_one_memory(fabric: Fabric, how: str) -> list[Tensor]:
    made = OneMemory(how)
    model, optimizer = fabric.setup(made, SGD(made.parameters(), lr=0.1))
    x = torch.arange(16.0, device=fabric.device).view(4, 4).sin()[fabric.global_rank :: fabric.world_size]
    for _ in range(3):
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return list(fabric.state_dict(model, all_ranks=True).values())


def errors_of_one_memory(fabric: Fabric) -> list[str]:
    return [sentence(train_one_memory, fabric, how) for how in ("transposed", "buffer")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "ddp_sharded", "ddp_fully_sharded", "deepspeed_stage_2"])
def test_parameters_with_memory_in_common_change_together_or_are_refused(name: str) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=name, launcher="forkserver")
    with Fabric(accelerator=ACCELERATOR, devices=1) as alone:
        torch.testing.assert_close(fabric.launch(train_one_memory, "apart"), train_one_memory(alone, "apart"))
        if name == "ddp":
            expected = train_one_memory(alone, "transposed")
            torch.testing.assert_close(fabric.launch(train_one_memory, "transposed"), expected)
            return
    for found in fabric.launch(errors_of_one_memory):
        assert "ValueError: `up` of `OneMemory` shares memory with `down`" in found
