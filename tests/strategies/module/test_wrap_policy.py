"""`auto_wrap_policy="blocks"`: what repeats in a model and holds its parameters is sharded one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fabric import Fabric
from fabric.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    blocks_of,
)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


NAMES = ("up", "down")
"""Of 144 and 136 parameters."""


class GPT(nn.Module):
    """Has a head that is tied to its embedding."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        output = self.head(x)
        assert isinstance(output, Tensor)
        return output


class NamesItsBlocks(nn.Module):
    """As models of transformers do."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.rest = nn.Embedding(10, 8), Block(), nn.Sequential(nn.Linear(8, 8), Block())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rest(self.first(self.embedding(tokens)))
        assert isinstance(x, Tensor)
        return x


class Translator(nn.Module):
    """Contains torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, dim_feedforward=16, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        output = self.transformer(x, x)
        assert isinstance(output, Tensor)
        return output


class Bare(nn.Module):
    """A block without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Block(), Block()])) for _ in range(2))


def tied_blocks() -> nn.Module:
    model = GPT()
    model.blocks[1].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    return model


def compiled_blocks() -> nn.Module:
    model = GPT()
    model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
    return model


def small_heads() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 8), nn.ModuleList([Block(2), Block(2)]))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (GPT(), ["blocks.0", "blocks.1", "blocks.2"]),
        (
            Translator(),
            [f"transformer.{half}.layers.{i}" for half in ("encoder", "decoder") for i in range(2)],
        ),
        (NamesItsBlocks(), ["first", "rest.1"]),
        (Experts(), ["layers.0", "layers.1"]),
        (tied_blocks(), ["blocks.2"]),
        (nn.Sequential(Bare(), Bare()), ["0", "1"]),
        (compiled_blocks(), [f"blocks.{i}._orig_mod" for i in range(3)]),
        (GPT(num=1), []),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []),
        (small_heads(), []),
    ],
    ids=["gpt", "transformer", "named", "experts", "tied", "bare", "compiled", "one block", "layers", "small"],
)
def test_blocks_are_the_outermost_modules_that_repeat_and_hold_the_parameters(
    model: nn.Module, names: list[str]
) -> None:
    of = {part: name for name, part in model.named_modules()}
    assert [of[block] for block in blocks_of(model)] == names
    assert FSDPStrategy().units(model) == names
    assert FSDPStrategy(auto_wrap_policy=None).units(model) == []


@pytest.mark.parametrize(
    ("policy", "units"),
    [
        (partial(size_based_auto_wrap_policy, min_num_params=200), ["blocks.0", "blocks.1"]),
        (partial(size_based_auto_wrap_policy, min_num_params=140), ["blocks.0.up", "blocks.1.up"]),
        (partial(size_based_auto_wrap_policy, min_num_params=130), [f"blocks.{i}.{n}" for i in "01" for n in NAMES]),
        (size_based_auto_wrap_policy, []),
        (partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), ["blocks.0", "blocks.1"]),
        (ModuleWrapPolicy({Block}), ["blocks.0", "blocks.1"]),
    ],
)
def test_a_function_of_torchs_form_wraps_inner_modules_first_and_counts_the_parameters_that_are_left(
    policy: Any, units: list[str]
) -> None:
    assert FSDPStrategy(auto_wrap_policy=policy).units(GPT(num=2)) == units


def in_shards(model: nn.Module, mesh: Any) -> None:
    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh["shard"])


MODELS: tuple[Callable[[], nn.Module], ...] = (GPT, Translator, NamesItsBlocks)
STRATEGIES: dict[str, Strategy] = {
    "fsdp": FSDPStrategy(),
    "recomputed": FSDPStrategy(activation_checkpointing_policy="blocks"),
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
    "ddp": DDPStrategy(activation_checkpointing_policy="blocks"),
}


def steps(model: nn.Module, optimizer: Optimizer, backward: Callable[[Tensor], None]) -> None:
    for step in range(3):
        backward(model(torch.arange(4).view(1, 4) + step).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train(fabric: Fabric) -> list[tuple[list[str], dict[str, Tensor], list[int], int]]:
    """Of each model: its units, the weights after three steps, how many parameters are whole when a part of a block
    begins, and how often these parts ran."""
    found = []
    for make in MODELS:
        torch.manual_seed(0)
        model: Any = make()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gathered: list[int] = []

        def count(*_: Any, model: nn.Module = model, gathered: list[int] = gathered) -> None:
            gathered.append(sum(not isinstance(parameter, DTensor) for parameter in model.parameters()))

        for block in blocks_of(model):
            next(block.children()).register_forward_pre_hook(count)
        steps(model, optimizer, fabric.backward)
        found.append((fabric.strategy.units(model), fabric.state_dict(model), gathered, len(blocks_of(model))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_blocks_are_gathered_or_recomputed_one_at_a_time_and_train_as_one_process(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    strategy = STRATEGIES[name]
    results = Fabric(
        accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver", sanitize=False
    ).launch(train)
    for make, (units, weights, gathered, num_blocks) in zip(MODELS, results, strict=True):
        torch.manual_seed(0)
        plain = make()
        steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), lambda loss: loss.backward())
        torch.testing.assert_close(weights, {key: each.detach() for key, each in plain.state_dict().items()})
        sizes = [len(list(block.parameters())) for block in blocks_of(plain)]
        is_recomputed = strategy.activation_checkpointing_policy is not None
        assert len(gathered) == 3 * num_blocks * (1 + is_recomputed)
        if name == "ddp":
            assert units == []
        else:
            assert units == [key for key, part in plain.named_modules() if part in blocks_of(plain)]
            assert max(gathered) <= len(list(plain.parameters())) - sum(sizes) + max(
                sizes
            )  # the root's and one block's
    told = capfd.readouterr().err.count("`strategy='fsdp'` gathers the weights of 3 `Block` one at a time, and all ")
    assert told == (1 if isinstance(strategy, FSDPStrategy) else 0)


class Parts(GPT):
    """Calls parts of its blocks, and not the blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block.down(block.up(x))  # type: ignore[union-attr, operator]
        return x


class Skipping(GPT):
    """Leaves out one block, another one on each rank."""

    skipped = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = x if number == self.skipped else block(x)
        return x


def run_otherwise(fabric: Fabric) -> list[str]:
    """What comes of models that run their blocks in another way than as modules, all in the same order."""
    found = []
    for kind in (Parts, Skipping):
        torch.manual_seed(0)
        model: Any = kind()
        model.skipped = fabric.global_rank
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            fabric.backward(model(torch.arange(4).view(1, 4)).sum())
            optimizer.step()
            found.append("trained")
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_blocks_that_are_not_run_as_modules_in_one_order_raise_with_the_policy_to_write() -> None:
    of_parts, of_skipping = ranks(FSDPStrategy()).launch(run_otherwise)
    assert "Forward of `Parts` computed with a parameter that is in shards" in of_parts
    assert "Ranks ran submodules of `Skipping` in different orders." in of_skipping
    for words in (of_parts, of_skipping):
        assert "`FSDPStrategy(auto_wrap_policy=None)`, which gathers the whole model at once" in words
    assert ranks(FSDPStrategy(auto_wrap_policy=None)).launch(run_otherwise) == ["trained"] * 2


def ranks(strategy: Strategy) -> Fabric:
    return Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, launcher="forkserver")


def test_a_model_without_blocks_is_an_error_for_checkpointing_and_is_reported_by_fsdp_if_it_is_large() -> None:
    fabric = Fabric(
        accelerator=ACCELERATOR, devices=1, strategy=SingleDeviceStrategy(activation_checkpointing_policy="blocks")
    )
    with pytest.raises(
        ValueError, match=r"policy='blocks'`: `Linear` has no blocks, .* Name classes of its submodules"
    ):
        fabric.setup(nn.Linear(2, 2))
    with torch.device("meta"):
        large, small = nn.Linear(2**13, 2**13), nn.Linear(2, 2)
    assert FSDPStrategy()._words(small) is None
    assert "`Linear` has 0.3 GiB of parameters, and `strategy='fsdp'` gathers all" in str(FSDPStrategy()._words(large))
