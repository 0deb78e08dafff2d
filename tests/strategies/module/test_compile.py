"""A compiled model trains as the same model uncompiled, and nothing of ours is compiled with it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any, Literal, TypeAlias

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import preload

import fabric.strategies
from fabric import Fabric
from fabric.strategies import FSDPStrategy, Strategy

Way: TypeAlias = Literal[
    "", "before", "after", "in place", "in a function", "each block", "each block in place", "loss"
]
WIDTH, LENGTH, VOCABULARY = 8, 6, 11
OURS = str(Path(fabric.strategies.__file__).parent)


class Block(nn.Module):
    """Attention over rotated features, and statistics that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k = q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin
        return x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Net(nn.Module):
    """A small language model with rotary positions: backward needs its buffers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        angles = torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH).float()
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x)

    def loss(self, tokens: Tensor) -> Tensor:
        return cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


def num_blocks_for(way: Way) -> int:
    """Two, if blocks share what is compiled. Each further block of a model that is compiled at once takes a second."""
    return 2 if way in ("each block", "each block in place") else 1


def train(fabric: Fabric, way: Way, backend: str, num_blocks: int) -> tuple[list[float], list[int], list[str]]:
    """The losses, how many functions had been compiled after each step, and in which files they are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: Any = Net(num_blocks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if way == "each block":
        net.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in net.blocks)
    model, optimizer = fabric.setup(torch.compile(net, backend=backend) if way == "before" else net, optimizer)
    called: Callable[[Tensor], Tensor] = model
    if way == "after":
        called = torch.compile(model, backend=backend, recompile_limit=64)  # stage 3 compiles each submodule by itself
    if way == "in place":
        model.compile(backend=backend)
    if way == "in a function":
        called = torch.compile(lambda tokens: model(tokens) * 1.0, backend=backend)
    if way == "each block in place":
        for block in model.blocks:
            block.compile(backend=backend)
    loss_of = lambda tokens: cross_entropy(called(tokens).flatten(0, 1), tokens.flatten())  # noqa: E731
    if way == "loss":
        model.mark_forward_method("loss")
        loss_of = torch.compile(model.loss, backend=backend)
    losses: list[float] = []
    numbers: list[int] = []
    generator = torch.Generator().manual_seed(fabric.global_rank)
    with compiled_codes() as codes:
        for step in range(5):
            for micro in range(2):
                tokens = torch.randint(VOCABULARY, (4 - step % 2, LENGTH), generator=generator)
                with fabric.no_backward_sync(model) if micro == 0 else nullcontext():
                    loss = loss_of(tokens)
                    fabric.backward(loss / 2, model=model)
                losses.append(float(fabric.all_reduce(loss.detach())))
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(len(codes))
        model.eval()
        with torch.no_grad():
            losses.append(float(fabric.all_reduce(loss_of(tokens))))
        model.train()
    return losses, numbers, [code.co_filename for code in codes]


class Warnings(logging.Handler):
    """What torch's compiler warns of within `with`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("torch._dynamo").addHandler(self)
        return self.messages

    def __exit__(self, *raised: object) -> None:
        logging.getLogger("torch._dynamo").removeHandler(self)


@contextmanager
def compiled_codes() -> Iterator[list[CodeType]]:
    """What torch's compiler compiles within it."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    codes: list[CodeType] = []
    handle = register_bytecode_hook(lambda code, compiled: codes.append(code))
    yield codes
    handle.remove()


def compare(fabric: Fabric, ways: tuple[Way, ...], backend: str) -> None:
    expected = {}
    for num_blocks in {num_blocks_for(way) for way in ways}:
        expected[num_blocks], _, none = train(fabric, "", backend, num_blocks)
        assert not none
    for way in ways:
        num_blocks = num_blocks_for(way)
        with Warnings() as warnings:
            losses, numbers, files = train(fabric, way, backend, num_blocks)
        assert not [message for message in warnings if "recompile_limit" in message], way
        torch.testing.assert_close(
            losses, expected[num_blocks], rtol=1e-5, atol=1e-5, msg=lambda words, way=way: f"{way}: {words}"
        )
        assert files, way
        assert not [file for file in files if file.startswith(OURS)], way
        # Two sizes of batch, and what is compiled for the second is for any size.
        assert numbers[1:] == [numbers[1]] * 4, f"{way}: {numbers}"


def compare_by_inductor(fabric: Fabric, folder: str) -> None:
    """Compiled anew in each session: a session that is killed while g++ links leaves an empty library to all others."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    compare(fabric, ("after",), "inductor")


EVERY_WAY: tuple[Way, ...] = (
    "after",
    "before",
    "in place",
    "in a function",
    "each block",
    "each block in place",
    "loss",
)
SHARDED = FSDPStrategy(auto_wrap_policy=Block)


@pytest.fixture(scope="module")
def ranks_import_the_compiler() -> None:
    """Backends of torch's compiler import inductor's lowerings at the first graph: 1.7 s in each rank."""
    preload("torch._inductor.lowering")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ranks_import_the_compiler")
@pytest.mark.parametrize(
    ("strategy", "ways"),
    [
        *(  # the cases `compile` and `compile_before` of the conformance suite run under every strategy
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (
                ("ddp", ("in place", "each block")),
                ("single_device", ("after",)),
                ("ddp_sharded", ("after",)),
                ("deepspeed_stage_2", ("after",)),
                ("deepspeed_stage_3", ("after",)),
                ("ddp", EVERY_WAY),
                (SHARDED, ("after", "each block in place", "loss")),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_compiled_model_trains_as_it_does_uncompiled_and_nothing_of_ours_is_compiled(
    strategy: str | Strategy, ways: tuple[Way, ...]
) -> None:
    devices = 1 if strategy == "single_device" else 2
    Fabric(accelerator=ACCELERATOR, devices=devices, strategy=strategy).launch(compare, ways, "aot_eager")


@pytest.mark.slow
@pytest.mark.thorough  # `aot_eager` traces the same graphs; only what g++ makes of them is left
@pytest.mark.timeout(600)  # a minute of g++'s work
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("deepspeed_stage_3", marks=pytest.mark.thorough)])
def test_a_model_compiled_by_inductor_trains_as_it_does_uncompiled(
    strategy: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.getbasetemp() / "inductor")
    Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy).launch(compare_by_inductor, folder)


class Scaled(nn.Linear):
    """A model of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def compile_several(fabric: Fabric) -> None:
    """Models of the user's, and one of torch's own."""
    for model in (Scaled(1, 2), Scaled(2, 2), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))):
        with compiled_codes() as codes:
            x = torch.ones(2, next(model.parameters()).shape[1])
            called = torch.compile(fabric.setup(model), backend="eager", fullgraph=True)
            fabric.backward(called(x).sum())
        assert codes
        assert not [code for code in codes if code.co_filename.startswith(OURS)]


@pytest.mark.slow
def test_with_fullgraph_the_graph_is_that_of_the_users_forward() -> None:
    Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp").launch(compile_several)
