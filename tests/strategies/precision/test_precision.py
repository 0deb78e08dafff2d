"""The `-true` precisions over strategies: one dtype for all that a model holds, is given and makes, and complex stays
complex."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import ModelParallelStrategy
from fabric.strategies.precision.precision import DefaultDtype, Precision, cast_inputs, cast_module
from fabric.strategies.tensors.nests import map_leaves


@dataclass
class Inputs:
    """Numbers, their positions, and what a model writes into."""

    x: Tensor
    positions: Tensor
    keep: Tensor
    name: str = "inputs"


class Rotary(nn.Module):
    """Turns pairs of numbers by complex factors, as rotary embeddings do."""

    turns: Tensor

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length).float(), 1 / 10 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        turned = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2))) * self.turns[positions]
        return self.project(torch.view_as_real(turned).flatten(-2).to(x.dtype))


class Net(nn.Module):
    """Masks by a tensor that forward makes; recomputes a layer in backward."""

    def __init__(self, recompute: bool = True) -> None:
        super().__init__()
        self.rotary = Rotary(4, 8)
        self.head = nn.Linear(4, 1)
        self.recompute = recompute
        self.made: list[torch.dtype] = []

    def masked(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[-1])
        self.made.append(mask.dtype)
        return (x + mask).tanh() * torch.ones(())

    def forward(self, inputs: Inputs) -> Tensor:
        assert inputs.positions.dtype is torch.int64
        assert inputs.keep.dtype is torch.bool
        x = self.rotary(inputs.x, inputs.positions)
        x = checkpoint(self.masked, x, use_reentrant=False) if self.recompute else self.masked(x)
        return self.head(x).squeeze(-1) * inputs.keep


def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 4, generator=generator)
    return Inputs(x=x, positions=torch.arange(6), keep=torch.arange(6) < 5)


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def plain(precision: Precision) -> tuple[float, list[Tensor]]:
    """Loss and weights after a step in plain PyTorch, all numbers of one dtype."""
    model = net()
    cast_module(precision, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = inputs()
    batch.x = batch.x.to(precision.param_dtype)
    with DefaultDtype(precision.param_dtype):
        loss = model(batch).square().mean()
        loss.backward()
    optimizer.step()
    return loss.item(), [parameter.detach().double() for parameter in model.parameters()]


STRATEGIES = {
    ("single_device", 1): ("64-true", "bf16-true", "16-true"),
    ("ddp", 2): ("64-true", "bf16-true"),
    ("fsdp", 2): ("64-true", "bf16-true"),
    ("ddp_sharded", 2): ("64-true",),
    ("ddp_fully_sharded", 2): ("16-true",),
    ("model_parallel", 2): ("64-true", "bf16-true"),
    ("deepspeed_stage_1", 2): ("bf16-true",),
    ("deepspeed_stage_2", 2): ("bf16-true",),
    ("deepspeed_stage_3", 2): ("bf16-true",),
}


def in_shards(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


def train(world: World, strategy: str, words: tuple[str, ...]) -> list[tuple[Any, ...]]:
    results: list[tuple[Any, ...]] = []
    for word in words:
        where: dict[str, Any] = {"launcher": "external"} if world.size > 1 else {"devices": 1}
        made_of = ModelParallelStrategy(parallelize_fn=in_shards, shard=2) if strategy == "model_parallel" else strategy
        with Fabric(accelerator=ACCELERATOR, strategy=made_of, precision=word, **where) as fabric:
            fabric.launch()
            model = net()
            made, turns = model.made, model.rotary.turns.clone()
            model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
            kept = model.rotary.turns.detach().clone()
            loss = model(inputs()).square().mean()
            fabric.backward(loss)
            optimizer.step()
            with torch.no_grad():
                after = model(inputs()).square().mean().item()
            with pytest.raises(AssertionError):
                model(Inputs(x=inputs().x, positions=torch.ones(6), keep=inputs().keep))
            same = torch.allclose(kept, turns.to(kept.dtype), atol=1e-6) if kept.is_complex() else False
            results.append((loss.item(), after, set(made), len(made), kept.dtype, same, torch.get_default_dtype()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), list(STRATEGIES), ids=str)
def test_complex_buffers_and_tensors_made_in_forward_have_the_precisions_dtype(strategy: str, size: int) -> None:
    words = STRATEGIES[strategy, size]
    for of_rank in run_world(size, train, strategy, words):
        for word, (loss, after, made, num_made, kept, same, default) in zip(words, of_rank, strict=True):
            precision = Precision.parse(word)
            expected, weights = plain(precision)
            assert made == {precision.param_dtype}
            assert num_made == 3  # forward, again in backward, and the forward after the step
            assert kept is (torch.complex128 if word == "64-true" else torch.complex64)
            assert same
            assert default is torch.float32
            tolerance = 1e-12 if word == "64-true" else 2e-2
            assert loss == pytest.approx(expected, rel=tolerance)
            assert after == pytest.approx(loss_of(weights, precision), rel=tolerance)


def loss_of(weights: list[Tensor], precision: Precision) -> float:
    model = net().double()
    cast_module(Precision.parse("64-true"), model)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data = weight
    batch = inputs()
    batch.x = batch.x.double()
    with DefaultDtype(torch.float64):
        return model(batch).square().mean().item()


def test_complex_parameters_and_buffers_keep_their_imaginary_part_in_the_width_of_the_precision() -> None:
    for word, real, imaginary in (
        ("64-true", torch.float64, torch.complex128),
        ("bf16-true", torch.bfloat16, torch.complex64),
        ("16-true", torch.float16, torch.complex64),
        ("32-true", torch.float32, torch.complex64),
    ):
        with Fabric(accelerator=ACCELERATOR, devices=1, precision=word) as fabric:  # type: ignore[arg-type]
            module = nn.ParameterDict({"c": torch.tensor([1 + 2j]), "r": torch.ones(1)})
            module.register_buffer("i", torch.tensor([3]))
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            c = module["c"]
            module, optimizer = fabric.setup(module, optimizer)
            assert module["c"] is c  # in place: the optimizer steps it
            assert (module["c"].dtype, module["r"].dtype, module.i.dtype) == (imaginary, real, torch.int64)
            assert module["c"].tolist() == [1 + 2j]


def test_inputs_are_cast_in_every_container_and_what_needs_no_cast_is_passed_on_itself() -> None:
    precision = Precision.parse("bf16-true")
    wide, narrow, whole = torch.ones(2), torch.ones(2).bfloat16(), torch.arange(2)

    class Plain:
        x = wide

    made = Plain()
    nest = {"inputs": Inputs(wide, whole, whole > 0), "pair": (wide, [torch.tensor(1j)]), "plain": made, "none": None}
    cast = cast_inputs(precision, nest)
    assert (cast["inputs"].x.dtype, cast["inputs"].positions is whole, cast["inputs"].name) == (
        torch.bfloat16,
        True,
        "inputs",
    )
    assert nest["inputs"].x is wide  # type: ignore[union-attr]
    assert cast["pair"][0].dtype is torch.bfloat16
    assert cast["pair"][1][0].dtype is torch.complex64
    assert cast["plain"] is made
    cache: dict[str, list[Tensor]] = {"keys": [narrow]}
    assert cast_inputs(precision, cache) is cache  # what forward writes into it stays there


def test_the_default_dtype_is_restored_when_forward_raises_and_over_threads() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.within, self.go_on = threading.Barrier(2), threading.Event()

        def forward(self, is_first: bool) -> torch.dtype:
            self.within.wait(20)
            if not is_first:
                self.go_on.wait(20)
            return torch.zeros(1).dtype

    with Fabric(accelerator=ACCELERATOR, devices=1, precision="bf16-true") as fabric:
        models = fabric.setup(Waits()), fabric.setup(Waits())
        models[1].within, models[1].go_on = models[0].within, models[0].go_on
        dtypes: list[torch.dtype] = []

        def first() -> None:
            dtypes.append(models[0](True))
            models[0].go_on.set()

        threads = [threading.Thread(target=first), threading.Thread(target=lambda: dtypes.append(models[1](False)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dtypes == [torch.bfloat16] * 2
        assert torch.get_default_dtype() is torch.float32

        class Fails(nn.Module):
            def forward(self) -> None:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fabric.setup(Fails())()
        assert torch.get_default_dtype() is torch.float32


def test_a_compiled_model_makes_tensors_of_the_precisions_dtype() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.zeros(2)

    compilers: dict[str, Callable[[Fabric], Any]] = {
        "before setup": lambda fabric: fabric.setup(torch.compile(Masks(), backend="eager")),
        "after setup": lambda fabric: torch.compile(fabric.setup(Masks()), backend="eager"),
    }
    for when, make in compilers.items():
        with Fabric(accelerator=ACCELERATOR, devices=1, precision="bf16-true") as fabric:
            assert make(fabric)(torch.ones(1, 2)).dtype is torch.bfloat16, when
        assert torch.get_default_dtype() is torch.float32


def test_mapping_a_nest_returns_containers_of_the_same_types() -> None:
    class Fields:
        """As attrs makes its classes."""

        __attrs_attrs__ = (type("Attribute", (), {"name": "x"}),)

        def __init__(self, x: int) -> None:
            self.x = x

    nest = [Fields(1), torch.return_types.max((torch.ones(1), torch.ones(1))), {1: (2, None)}, Inputs]
    doubled = map_leaves(lambda leaf: leaf * 2 if isinstance(leaf, int) else leaf, nest, is_leaf=lambda leaf: False)
    assert (doubled[0].x, nest[0].x) == (2, 1)  # type: ignore[union-attr]
    assert type(doubled[1]) is torch.return_types.max
    assert doubled[2:] == [{1: (4, None)}, Inputs]
