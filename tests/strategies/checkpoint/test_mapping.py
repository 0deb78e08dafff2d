"""`fabric.load(..., mmap=True)`: tensors share the memory of a checkpoint's files until somebody writes to them."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import Tensor, nn
from torch.optim import AdamW

from fabric import CheckpointError, Fabric
from fabric.strategies.checkpoint.values import DTYPES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped from Linux's /proc")


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric(accelerator=ACCELERATOR, devices=1)
    yield made
    made.close()


def is_mapped(tensor: Tensor) -> bool:
    """Whether the tensor's memory is mapped from a file of a checkpoint."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_ = line.split()
        first, past = (int(each, 16) for each in place.split("-"))
        if first <= tensor.data_ptr() < past:
            return line.removesuffix(" (deleted)").endswith(".bin")
    raise AssertionError("in no memory")


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(x)))
        return out


TOKENS = torch.arange(16)


def trained(fabric: Fabric, path: Path, net: Net) -> tuple[Net, AdamW, list[float]]:
    """A model and its optimizer after the step at which they were saved, and the losses of the next steps."""
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), 0.1))
    train(fabric, model, optimizer, 2)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    return net, optimizer, train(fabric, model, optimizer, 3)


def train(fabric: Fabric, model: nn.Module, optimizer: Any, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = nn.functional.cross_entropy(model(TOKENS), TOKENS)
        optimizer.zero_grad()
        fabric.backward(loss, model=model)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("num_steps", [0, 1])
def test_weights_and_optimizer_states_are_mapped_and_train_on_as_if_they_were_read(
    tmp_path: Path, fabric: Fabric, num_steps: int
) -> None:
    _, _, losses = trained(fabric, tmp_path / "saved", Net())
    written = {each: each.read_bytes() for each in (tmp_path / "saved").iterdir()}
    model, optimizer = fabric.setup(net := Net(), AdamW(net.parameters(), 0.1))
    train(fabric, model, optimizer, num_steps)
    fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer}, mmap=True)
    moments = [each for state in optimizer.state.values() for name, each in state.items() if name != "step"]
    assert all(map(is_mapped, [*net.parameters(), net.norm.running_mean, *moments]))  # type: ignore[list-item]
    assert train(fabric, model, optimizer, 3) == losses
    assert written == {each: each.read_bytes() for each in (tmp_path / "saved").iterdir()}


def test_without_mmap_nothing_is_mapped(tmp_path: Path, fabric: Fabric) -> None:
    net, optimizer, _ = trained(fabric, tmp_path / "saved", Net())
    fabric.load(tmp_path / "saved", {"model": net, "optimizer": optimizer})
    assert not any(map(is_mapped, net.parameters()))


def test_what_the_state_does_not_name_is_mapped(tmp_path: Path, fabric: Fabric) -> None:
    tensors = {
        str(dtype): torch.arange(15 * dtype.itemsize, dtype=torch.uint8).remainder(2).view(dtype).view(3, 5)
        for dtype in DTYPES.values()
    }
    fabric.save(tmp_path / "saved", {"tensors": tensors, "empty": torch.empty(0, 3), "one": torch.tensor(7)})
    found = fabric.load(tmp_path / "saved", mmap=True)
    assert all(map(is_mapped, found["tensors"].values()))
    for name, tensor in tensors.items():
        assert torch.equal(found["tensors"][name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert found["tensors"][name].dtype == tensor.dtype
    assert found["empty"].shape == (0, 3)
    assert found["one"] == 7


def test_a_parameter_in_the_memory_of_something_else_keeps_it(tmp_path: Path, fabric: Fabric) -> None:
    net, _, _ = trained(fabric, tmp_path / "saved", Net())
    flat = torch.zeros(2, 16, 8)
    net.embed.weight.data = flat[0]
    shared = net.norm.weight.share_memory_()
    array = bytearray(8 * 4)  # of an array of NumPy
    net.norm.bias = nn.Parameter(torch.frombuffer(array, dtype=torch.float32))
    fabric.load(tmp_path / "saved", {"model": net}, mmap=True)
    assert torch.equal(flat[0], net.embed.weight)
    assert torch.equal(torch.frombuffer(array, dtype=torch.float32), net.norm.bias)
    assert not is_mapped(net.norm.bias)
    assert shared.is_shared()
    assert not is_mapped(net.embed.weight)
    assert is_mapped(net.head.weight)


def test_weights_that_were_tied_when_they_were_saved_share_no_memory_in_a_model_where_they_are_not(
    tmp_path: Path, fabric: Fabric
) -> None:
    trained(fabric, tmp_path / "saved", Net(tied=True))
    net = Net()
    fabric.load(tmp_path / "saved", {"model": net}, mmap=True)
    assert torch.equal(net.embed.weight, net.head.weight)
    with torch.no_grad():
        net.embed.weight.zero_()
    assert net.head.weight.all()


def test_two_names_of_one_tensor_in_an_optimizer_get_the_values_of_both(tmp_path: Path, fabric: Fabric) -> None:
    net, optimizer, _ = trained(fabric, tmp_path / "first", Net())
    saved = {name: value.clone() for name, value in optimizer.state[net.embed.weight].items()}
    fabric.save(tmp_path / "saved", {"optimizer": optimizer})
    state = optimizer.state[net.embed.weight]
    state["exp_avg_sq"] = state["exp_avg"]
    fabric.load(tmp_path / "saved", {"optimizer": optimizer}, mmap=True)
    for name, value in saved.items():
        assert torch.equal(optimizer.state[net.embed.weight][name], value), name


def test_two_loads_of_one_checkpoint_share_no_memory(tmp_path: Path, fabric: Fabric) -> None:
    trained(fabric, tmp_path / "saved", Net())
    one, other = Net(), Net()
    for each in (one, other, other):
        fabric.load(tmp_path / "saved", {"model": each}, mmap=True)
    with torch.no_grad():
        one.embed.weight.zero_()
    assert other.embed.weight.all()


def test_a_tensor_of_another_dtype_or_layout_is_converted(tmp_path: Path, fabric: Fabric) -> None:
    fabric.save(tmp_path / "saved", {"model": (old := nn.Conv2d(2, 2, 3))})
    new = nn.Conv2d(2, 2, 3).to(torch.float64, memory_format=torch.channels_last)
    fabric.load(tmp_path / "saved", {"model": new}, mmap=True)
    assert new.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(new.weight.float(), old.weight, rtol=0, atol=0)


def test_a_backward_whose_forward_was_before_the_load_raises_as_after_a_load_in_place(
    tmp_path: Path, fabric: Fabric
) -> None:
    _, _, _ = trained(fabric, tmp_path / "saved", Net())
    net = Net()
    loss = net(TOKENS).sum()
    fabric.load(tmp_path / "saved", {"model": net}, mmap=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_mapped_weight_is_saved_by_torch_without_the_rest_of_its_file(tmp_path: Path, fabric: Fabric) -> None:
    fabric.save(tmp_path / "saved", {"small": torch.ones(4), "large": torch.ones(2**16)})
    small = fabric.load(tmp_path / "saved", mmap=True)["small"]
    torch.save(small, stream := io.BytesIO())
    assert is_mapped(small)
    assert len(stream.getvalue()) < 2**12


def test_a_moving_average_beside_the_weights_is_read(tmp_path: Path, fabric: Fabric) -> None:
    net, optimizer, _ = trained(fabric, tmp_path / "first", Net())
    average = fabric.ema(net, 0.5)
    train(fabric, net, optimizer, 2)
    average.update()
    fabric.save(tmp_path / "saved", {"model": net, "average": average})
    expected = fabric.state_dict(net)
    with average.applied():
        averaged = fabric.state_dict(net)
    fabric.load(tmp_path / "saved", {"model": net, "average": average}, mmap=True)
    torch.testing.assert_close(dict(fabric.state_dict(net)), dict(expected), rtol=0, atol=0)
    assert is_mapped(net.embed.weight)
    with average.applied():
        torch.testing.assert_close(dict(fabric.state_dict(net)), dict(averaged), rtol=0, atol=0)


def test_damaged_bytes_are_found_before_anything_is_mapped(tmp_path: Path, fabric: Fabric) -> None:
    net, _, _ = trained(fabric, tmp_path / "saved", Net())
    (file,) = (tmp_path / "saved").glob("*.bin")
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    before = [each.data_ptr() for each in net.parameters()]
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        fabric.load(tmp_path / "saved", {"model": net}, mmap=True)
    assert [each.data_ptr() for each in net.parameters()] == before


def test_only_files_that_save_wrote_to_a_folder_are_mapped(tmp_path: Path, fabric: Fabric) -> None:
    fabric.save("memory://mapped", {"one": torch.ones(3)})
    torch.save({"one": torch.ones(3)}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"an address of fsspec, .* Leave out `mmap`"):
        fabric.load("memory://mapped", mmap=True)
    with pytest.raises(ValueError, match=r"of another library, .* Leave out `mmap`"):
        fabric.load(tmp_path / "file.pt", mmap=True)
