"""A program as a user types it: a checker infers its classes, and reports the lines marked `error` and no others."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import assert_type

from fabric import Fabric


class Net(nn.Module):
    """One layer, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: `(N, 4)` -> `(N, 1)`."""
        return x @ self.weight

    def score(self, x: Tensor) -> float:
        """How large the outputs are."""
        return float(self(x).sum())


class Lines(IterableDataset[str]):
    """A stream."""

    def __iter__(self) -> Iterator[str]:
        yield "line"


def train(fabric: Fabric, steps: int, *, rate: float = 0.1) -> float:
    """What `launch` runs."""
    model = Net()
    optimizer = SGD(model.parameters(), lr=rate)
    model, optimizer = fabric.setup(model, optimizer)
    assert_type(model, Net)
    assert_type(optimizer, SGD)
    return model.score(torch.ones(steps, 4))


def main() -> None:
    """Every typed method, right and wrong."""
    fabric = Fabric(accelerator="cpu", devices=1)
    assert_type(fabric.launch(), None)
    assert_type(fabric.launch(train, 3, rate=0.2), float)
    fabric.launch(train, "wrong")  # error
    fabric.launch(train, 3, rte=0.2)  # error
    fabric.launch(train)  # error

    net = Net()
    assert_type(fabric.setup(net), Net)
    assert_type(fabric.setup_module(net), Net)
    model, optimizer = fabric.setup(net, AdamW(net.parameters()))
    assert_type(optimizer, AdamW)
    scheduler = StepLR(optimizer, 1)
    assert_type(fabric.setup(net, optimizer, scheduler=scheduler), tuple[Net, AdamW, StepLR])
    assert_type(fabric.setup(net, optimizer, SGD(net.parameters())), tuple[Net, AdamW, SGD])
    assert_type(fabric.setup_optimizers(optimizer), AdamW)
    torch.relu(model.weigth)  # error
    optimizer.stepp()  # error
    fabric.setup(optimizer, net)  # error
    fabric.setup_optimizers(net)  # error
    fabric.setup(net, movetodevice=False)  # error

    numbers = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    lines = DataLoader(Lines(), batch_size=None)
    numbers = fabric.setup_dataloaders(numbers)
    numbers, lines = fabric.setup_dataloaders(numbers, lines, use="validate")
    fabric.setup_dataloaders(numbers, use="training")  # error
    fabric.setup_dataloaders(net)  # error

    loss = model(torch.ones(2, 4)).mean()
    fabric.backward(loss)
    assert_type(fabric.all_gather(torch.ones(2)), Tensor)
    assert_type(fabric.all_gather(1.5), Tensor)
    assert_type(fabric.all_gather({"loss": torch.ones(2)}), dict[str, Tensor])
    assert_type(fabric.all_reduce({"loss": 1.5}), dict[str, Tensor])
    assert_type(fabric.all_reduce((torch.ones(2), [torch.ones(3)])), tuple[Tensor, list[Tensor]])
    assert_type(fabric.broadcast({"step": 3}), dict[str, int])
    fabric.all_reduce(torch.ones(2), reduce_op="average")  # error
    for batch in fabric.progress(numbers, "epoch"):
        print(batch)
