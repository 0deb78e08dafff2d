"""Under mixed precision, the loss that a program computes from outputs is that of autocast around forward and loss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy

from fabric import Fabric
from fabric.strategies import (
    DDPStrategy,
    ManualStrategy,
    ModelParallelStrategy,
    Pipeline,
    Precision,
    Strategy,
    blocks_of,
)

WIDTH, VOCABULARY = 8, 33


@dataclass
class Outputs:
    logits: Tensor
    labels: Tensor
    name: str = "outputs"


class ModelOutput(OrderedDict[str, Tensor]):
    """Has its entries as attributes, too, as the outputs of transformers."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda logits, labels: logits, lambda output: output),
    "nest": (lambda logits, labels: {"all": [labels, (logits,)]}, lambda output: output["all"][1][0]),
    "dataclass": (Outputs, lambda output: output.logits),
    "model output": (lambda logits, labels: ModelOutput(logits=logits), lambda output: output.logits),
    "attribute": (lambda logits, labels: SimpleNamespace(logits=logits), lambda output: output.logits),
    "distribution": (lambda logits, labels: Categorical(logits=logits), lambda output: output.logits),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, kind: str) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return KINDS[kind][0](self.head(x), tokens)


def compare(fabric: Fabric, dtype: torch.dtype, tolerance: float = 1e-6) -> None:
    """The loss of each kind of output, with gradients and without, beside plain autocast around forward and loss."""
    torch.manual_seed(0)
    plain, net = Net().to(fabric.device), Net()
    net.load_state_dict(plain.state_dict())
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.0))
    tokens = fabric.to_device(torch.arange(12).view(2, 6) + fabric.global_rank)
    for kind, (_, logits_of) in KINDS.items():

        def loss_of(output: Any, logits_of: Callable[[Any], Tensor] = logits_of) -> Tensor:
            return cross_entropy(logits_of(output).flatten(0, 1), tokens.flatten())

        with torch.autocast(fabric.device.type, dtype):
            expected = loss_of(plain(tokens, kind))
        output = model(tokens, kind)
        assert logits_of(output).dtype is torch.float32, kind
        loss = loss_of(output)
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated = loss_of(model(tokens, kind))
        for found in (loss, evaluated):
            torch.testing.assert_close(
                found, expected, rtol=tolerance, atol=tolerance, msg=lambda words, kind=kind: kind + words
            )
    assert isinstance(output, Categorical)
    assert type(model(tokens, "model output")) is ModelOutput
    integers = model(tokens, "dataclass")
    assert (type(integers), integers.labels.dtype, integers.name) == (Outputs, torch.int64, "outputs")


def in_shards(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh["shard"])


STRATEGIES: dict[str, Strategy | str] = {
    "ddp": "ddp",
    "find_unused": DDPStrategy(find_unused_parameters=True),
    "fsdp": "fsdp",
    "model_parallel": ModelParallelStrategy(parallelize_fn=in_shards, shard=2),
    "manual": ManualStrategy(parallelize=lambda module, context: module.to(context.device)),
    "ddp_sharded": "ddp_sharded",
    "ddp_fully_sharded": "ddp_fully_sharded",
    "deepspeed_stage_1": "deepspeed_stage_1",
    "deepspeed_stage_2": "deepspeed_stage_2",
    "deepspeed_stage_3": "deepspeed_stage_3",
}


TOLERANCES = {"fsdp": 5e-4}
"""`fully_shard` gathers weights in half precision, of the embedding too, whose output autocast leaves in float32."""


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_on_one_device_a_loss_of_outputs_is_that_of_autocast_around_it(precision: Any, dtype: torch.dtype) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision=precision) as fabric:
        compare(fabric, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loss_of_outputs_is_that_of_autocast_around_it(name: str) -> None:
    Fabric(
        accelerator=ACCELERATOR, devices=2, strategy=STRATEGIES[name], precision="bf16-mixed", launcher="forkserver"
    ).launch(compare, torch.bfloat16, TOLERANCES.get(name, 1e-6))


def test_outputs_stay_in_half_precision_on_request_and_under_true_precision() -> None:
    kept: Any = replace(Precision.parse("bf16-mixed"), output_dtype=None)
    for precision in (kept, Precision.parse("bf16-true")):
        with Fabric(accelerator=ACCELERATOR, devices=1, plugins=precision) as fabric:
            model = fabric.setup(nn.Linear(2, 2))
            assert model(torch.ones(1, 2)).dtype is torch.bfloat16


class Wide(nn.Linear):
    """Returns what autocast leaves alone beside what it computes."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y, y.double()


def test_a_tensor_that_is_returned_twice_stays_one_and_wider_ones_stay_as_they_are() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision="bf16-mixed") as fabric:
        first, second, wide = fabric.setup(Wide(2, 2))(torch.ones(1, 2))
        assert first is second
        assert (first.dtype, wide.dtype) == (torch.float32, torch.float64)


def compare_in_stages(fabric: Fabric) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)).to(fabric.device)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))
    net.load_state_dict(plain.state_dict())
    model = fabric.setup(net)
    x, y = torch.linspace(-1, 1, 32).view(8, 4).to(fabric.device), torch.arange(8).to(fabric.device)
    with torch.autocast(fabric.device.type, torch.bfloat16):
        expected = cross_entropy(plain(x), y)
    loss = model(x, y)
    fabric.backward(loss)
    with torch.no_grad():
        outputs = model(x)
    assert outputs.dtype is loss.dtype is torch.float32
    torch.testing.assert_close(
        [loss.detach(), cross_entropy(outputs, y)], [expected.detach()] * 2, rtol=1e-6, atol=1e-6
    )


def split(model: nn.Sequential, stage: int, num_stages: int) -> nn.Module:
    return model[:2] if stage == 0 else model[2:]


@pytest.mark.slow
def test_outputs_of_a_pipeline_are_float32() -> None:
    pipeline = Pipeline(degree=2, schedule="1F1B", num_microbatches=2, split=split, loss_fn=cross_entropy)
    strategy = ModelParallelStrategy(pipeline=pipeline)
    Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, precision="bf16-mixed", launcher="forkserver").launch(
        compare_in_stages
    )
