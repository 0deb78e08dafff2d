"""`make optimizers`: step each optimizer under each strategy, and write what was seen as the table of
`docs/measurements/optimizers.md`: the weights beside those of one process, and what a step sends beside one of SGD.

Every rank has the same batch, so gradients are those of one process to the last bit, and only the optimizer's step can
differ: SOAP, whose matrices are singular here, or Muon, which computes in bfloat16, would make much of a last bit.
Packages that are not installed have no row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from fabric.strategies.tensors.dtensor import whole
from fabric.strategies.tensors.nests import tensors_in

PAGE = Path(__file__).parents[2] / "docs/measurements/optimizers.md"
BEGIN, END = "<!-- measured: make optimizers -->\n", "<!-- end -->\n"
TOLERANCE = 1e-5
STEPS = 5
"""The sanitizer compares in the first four; what the fifth sends is counted."""
SGD = "torch.optim.SGD"
OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    SGD: ("momentum", {"lr": 0.05, "momentum": 0.9}),
    "torch.optim.AdamW": ("plain", {"foreach": False, "fused": False}),
    "torch.optim.AdamW foreach": ("one kernel for all", {"foreach": True}),
    "torch.optim.AdamW fused": ("one kernel for all", {"fused": True}),
    "torch.optim.Rprop": ("signs", {}),
    "torch.optim.Adafactor": ("rows and columns", {}),
    "torch.optim.Muon": ("matrices", {"lr": 0.01}),
    "torch.optim.LBFGS": ("all parameters", {"lr": 0.1, "max_iter": 3}),
    "pytorch_optimizer.Prodigy": ("all parameters", {}),
    "pytorch_optimizer.SOAP": ("matrices", {"lr": 0.01, "precondition_frequency": 2}),
    "pytorch_optimizer.Shampoo": ("matrices", {"lr": 0.01}),
    "pytorch_optimizer.Lamb": ("norms of parameters", {}),
    "schedulefree.AdamWScheduleFree": ("`eval()` and `train()`", {"lr": 0.01}),
    "lion_pytorch.Lion": ("signs", {}),
    "lion_pytorch.cautious_lion.Lion": ("means of parameters", {}),
    "pytorch_optimizer.AdEMAMix cautious": ("means of parameters", {"cautious": True}),
    "torchao.optim.AdamW8bit": ("blocks of 256", {}),
    "torchao.optim.AdamW4bit": ("blocks of 128", {}),
    "bitsandbytes.optim.AdamW8bit": ("blocks of 256", {}),
    "bitsandbytes.optim.AdamW32bit": ("plain", {}),
}
"""Each with what its update of an element depends on, and its arguments."""


def halves(module: nn.Module, mesh: DeviceMesh) -> None:
    for layer in module.children():
        fully_shard(layer, mesh=mesh["shard"])


STRATEGIES: Mapping[str, tuple[int, Strategy | str]] = {
    "ddp": (2, "ddp"),
    "ddp, shard_optimizer": (2, DDPStrategy(shard_optimizer=True)),
    "fsdp": (2, "fsdp"),
    "hsdp": (4, FSDPStrategy(device_mesh=(2, 2))),
    "model_parallel": (2, ModelParallelStrategy(parallelize_fn=halves, shard=2)),
    "ddp_sharded": (2, "ddp_sharded"),
    "ddp_fully_sharded": (2, "ddp_fully_sharded"),
    "deepspeed_stage_1": (2, "deepspeed_stage_1"),
    "deepspeed_stage_2": (2, "deepspeed_stage_2"),
    "deepspeed_stage_3": (2, "deepspeed_stage_3"),
}


def installed() -> list[str]:
    """The optimizers whose packages are installed."""
    return [name for name in OPTIMIZERS if find_spec(name.partition(".")[0]) is not None]


def make(name: str, parameters: Any) -> Optimizer:
    """One of `OPTIMIZERS`."""
    package, _, kind = name.partition(" ")[0].rpartition(".")
    made: Optimizer = getattr(import_module(package), kind)(parameters, **OPTIMIZERS[name][1])
    return made


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, collectives are counted, and the bytes that they return to this rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_messages = self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.num_messages += 1
            self.num_bytes += sum(tensor.nbytes for tensor in tensors_in(args[0]))
        return function(*args, **(kwargs or {}))


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    num_messages: int = 0
    num_bytes: int = 0
    """Of the last step, with its forward and backward."""


def trained(fabric: Fabric | None, name: str) -> Trained:
    """Some steps. Two shards of the middle matrix, of 12,544 elements, cut a block of 256."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 112, bias=False), nn.Linear(112, 112, bias=False), nn.Linear(112, 16, bias=False)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    optimizer = make(name, model.parameters())
    backward: Callable[[Tensor], Any] = Tensor.backward
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward
    inputs, targets = torch.arange(192.0).view(8, 24).sin(), torch.arange(128.0).view(8, 16).cos()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        backward(loss)
        return loss

    getattr(optimizer, "train", int)()
    for _ in range(STEPS - 1):
        optimizer.step(closure)
    with Sent() as sent:
        optimizer.step(closure)
    getattr(optimizer, "eval", int)()
    if fabric is not None:
        return Trained(fabric.state_dict(model, all_ranks=True), sent.num_messages, sent.num_bytes)
    return Trained({key: value.clone() for key, value in model.state_dict().items()})


def run_all(world: World, strategies: Sequence[str], names: Sequence[str]) -> list[dict[str, Trained | str]]:
    """What each optimizer does on rank 0 alone, and under each strategy; a sentence where `setup` refuses it."""
    torch.set_num_threads(1)
    several: list[dict[str, Trained | str]] = [{name: trained(None, name) for name in names} if world.rank == 0 else {}]
    for strategy in strategies:
        with Fabric(accelerator="cpu", devices=world.size, strategy=STRATEGIES[strategy][1]) as fabric:
            fabric.launch()
            found: dict[str, Trained | str] = {}
            for name in names:
                try:
                    found[name] = trained(fabric, name)
                except ValueError as error:
                    found[name] = str(error)
            several.append(found)
    return several


class Seen(NamedTuple):
    difference: float
    """The largest from one process, in units of the largest weight."""
    more_messages: int
    """That a step sends, than one of SGD does."""
    more_bytes: float
    """In units of those of the weights."""


def seen_under(strategies: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Seen | str]]:
    """Each optimizer under each strategy, beside one process and beside SGD, or the sentence with which `setup` refuses
    it. Strategies of as many ranks run in the same ones, which import the optimizers once."""
    seen: dict[str, dict[str, Seen | str]] = {}
    for size in {STRATEGIES[strategy][0] for strategy in strategies}:
        of_size = [strategy for strategy in strategies if STRATEGIES[strategy][0] == size]
        alone, *several = run_world(size, run_all, of_size, names)[0]
        for strategy, found in zip(of_size, several, strict=True):
            seen[strategy] = {
                name: each if isinstance(each, str) else compare(alone[name], each, found[SGD])
                for name, each in found.items()
            }
    return {strategy: seen[strategy] for strategy in strategies}


def compare(alone: Trained | str, found: Trained, sgd: Trained | str) -> Seen:
    assert isinstance(alone, Trained)
    assert isinstance(sgd, Trained)
    num_bytes = sum(weight.nbytes for weight in alone.weights.values())
    return Seen(
        difference(alone.weights, found.weights),
        found.num_messages - sgd.num_messages,
        (found.num_bytes - sgd.num_bytes) / num_bytes,
    )


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """The largest, in units of the largest weight."""
    return max(float((whole(found[name]) - right).abs().max() / right.abs().max()) for name, right in expected.items())


def column(seen: Mapping[str, Seen | str]) -> dict[str, str]:
    """Raises SystemExit for other numbers than those of one process."""
    wrong = {name: each for name, each in seen.items() if isinstance(each, Seen) and not each.difference <= TOLERANCE}
    if wrong:
        raise SystemExit(f"{wrong}")
    return {name: "refused" if isinstance(each, str) else cell(each) for name, each in seen.items()}


def cell(seen: Seen) -> str:
    return f"= +{seen.more_messages}, {seen.more_bytes:.2g}" if seen.more_messages else "="


def table(seen: Mapping[str, Mapping[str, Seen | str]]) -> str:
    """A row for each optimizer, a column for each strategy, and the sentences below it."""
    columns = {strategy: column(found) for strategy, found in seen.items()}
    lines = [" | ".join(["optimizer", "an update needs", *(f"`{strategy}`" for strategy in columns)])]
    lines.append("|".join(["---"] * (len(columns) + 2)))
    for name in installed():
        lines.append(" | ".join([f"`{name}`", OPTIMIZERS[name][0], *(each[name] for each in columns.values())]))
    sentences: dict[str, list[str]] = {}
    for strategy, found in seen.items():
        for name, each in found.items():
            if isinstance(each, str):
                kind = name.partition(" ")[0].rpartition(".")[2]
                sentences.setdefault(each.replace(f"`{kind}`", "`...`"), []).append(strategy)
    reasons = [f"- {', '.join(f'`{each}`' for each in dict.fromkeys(of))}: {text}\n" for text, of in sentences.items()]
    return "".join(f"| {line} |\n" for line in lines) + "\n" + "".join(reasons)


def in_page(strategy: str) -> dict[str, str]:
    """A column of the table that the page has."""
    rows = [line.strip("|\n ").split(" | ") for line in PAGE.read_text().split(BEGIN)[1].split("\n\n")[0].splitlines()]
    place = rows[0].index(f"`{strategy}`")
    return {row[0].strip("`"): row[place] for row in rows[2:]}


def main() -> None:
    """Measure, and write the page; writes nothing if numbers differ."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its step, a minute for each rank
    seen = seen_under(list(STRATEGIES), installed())
    for strategy, each in seen.items():
        print(strategy, column(each), flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table(seen) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
