"""Programs that save and load more than one model and its optimizer, or something else than they saved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from resumed_runs import refuse_difference
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from fabric import CheckpointError, Fabric, WorkerError, read_checkpoint

STRATEGIES = ("ddp", "fsdp", "deepspeed_stage_2", "ddp_fully_sharded")


class Net(nn.Module):
    def __init__(self, width: int = 8, *, more: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.more = nn.Linear(width, width) if more else None
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.embed(x))
        out: Tensor = self.head(hidden if self.more is None else self.more(hidden))
        return out


def made(fabric: Fabric, seed: int, net: Callable[[], Net]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = net()
    model, optimizer = fabric.setup(model, AdamW(each for each in model.parameters() if each.requires_grad))
    return model, optimizer


def train(fabric: Fabric, model: nn.Module, optimizer: Optimizer, num_steps: int = 2) -> float:
    """The mean loss of the last step over the ranks, which read different data."""
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(number + 10 * fabric.global_rank)
        x = torch.randint(16, (4,), generator=generator)
        loss = cross_entropy(model(x), x)
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
    return float(fabric.all_reduce(loss.detach()))


def refused(fabric: Fabric, path: str, state: dict[str, Any], *, strict: bool = True) -> str:
    """The words of the error, after which nothing is changed."""
    before = [fabric.state_dict(each) for each in state.values() if isinstance(each, nn.Module)]
    with pytest.raises(CheckpointError) as raised:
        fabric.load(path, state, strict=strict)
    after = [fabric.state_dict(each) for each in state.values() if isinstance(each, nn.Module)]
    refuse_difference(after, before, path)
    return str(raised.value)


def two_models(fabric: Fabric, folder: str) -> None:
    def pair(seed: int) -> dict[str, Any]:
        first, its = made(fabric, seed, Net)
        second, other = made(fabric, seed + 1, lambda: Net(4))
        return {"generator": first, "critic": second, "optimizers": [its, other]}

    def go_on(state: dict[str, Any]) -> list[float]:
        own, others = state["optimizers"]
        return [train(fabric, state["generator"], own), train(fabric, state["critic"], others)]

    state = pair(1)
    go_on(state)
    train(fabric, state["critic"], state["optimizers"][1], 3)
    fabric.save(f"{folder}/two", state)
    losses = go_on(state)
    fabric._connected.forget()
    state = pair(3)
    fabric.load(f"{folder}/two", state)
    assert [fabric._connected.objects.optimizers[each].num_steps for each in state["optimizers"]] == [2, 5]
    assert fabric.num_steps == 5
    assert go_on(state) == pytest.approx(losses, rel=1e-5)
    fabric._connected.forget()


def frozen_with_adapter(fabric: Fabric, folder: str) -> None:
    def frozen() -> Net:
        net = Net(more=True)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.startswith("more"))
        return net

    path = f"{folder}/adapter"
    model, optimizer = made(fabric, 1, frozen)
    train(fabric, model, optimizer)
    fabric.save(path, {"model": model, "optimizer": optimizer}, filter={"model": lambda name, _: "more" in name})
    assert set(read_checkpoint(path)["model"]) == {"more.weight", "more.bias"}
    expected = fabric.state_dict(model, optimizer)
    fabric._connected.forget()
    model, optimizer = made(fabric, 1, frozen)
    state = {"model": model, "optimizer": optimizer}
    assert "model: embed.weight" in refused(fabric, path, state)
    fabric.load(path, state, strict=False)
    refuse_difference(fabric.state_dict(model, optimizer), expected, path)
    fabric._connected.forget()


def tied(fabric: Fabric, folder: str) -> None:
    path = f"{folder}/tied"
    model, optimizer = made(fabric, 1, lambda: Net(tied=True))
    train(fabric, model, optimizer)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    expected = fabric.state_dict(model, optimizer)
    fabric._connected.forget()
    model, optimizer = made(fabric, 2, lambda: Net(tied=True))
    fabric.load(path, {"model": model, "optimizer": optimizer})
    refuse_difference(fabric.state_dict(model, optimizer), expected, path)
    fabric._connected.forget()
    model, optimizer = made(fabric, 3, Net)
    fabric.load(path, {"model": model})
    refuse_difference(fabric.state_dict(model), expected[0], path)
    fabric._connected.forget()


def changed(fabric: Fabric, folder: str) -> None:
    path = f"{folder}/changed"
    model, optimizer = made(fabric, 1, Net)
    train(fabric, model, optimizer)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    saved = fabric.state_dict(model)
    fabric._connected.forget()
    model, optimizer = made(fabric, 2, lambda: Net(more=True))
    state = {"model": model, "optimizer": optimizer}
    words = refused(fabric, path, state)
    assert all(word in words for word in ("model: more.weight", "model: more.bias", "groups of [6] parameters"))
    words = refused(fabric, path, state, strict=False)
    assert "more.weight" not in words
    assert "groups of [4]" in words
    before = fabric.state_dict(model)
    fabric.load(path, {"model": model}, strict=False)
    refuse_difference(dict(fabric.state_dict(model)), dict(before) | dict(saved), path)
    train(fabric, model, optimizer)
    fabric._connected.forget()
    model, optimizer = made(fabric, 3, lambda: Net(6))
    for strict in (True, False):
        assert words_of_shapes(refused(fabric, path, {"model": model}, strict=strict)) == 4
    fabric._connected.forget()


def words_of_shapes(words: str) -> int:
    return sum(line.startswith("  model: ") for line in words.splitlines())


def impossible_places(fabric: Fabric, folder: str) -> None:
    model, optimizer = made(fabric, 1, Net)
    state = {"model": model, "optimizer": optimizer}
    for path in ("/proc/nothing/here", f"{folder}/file/x", "/dev/full/x"):
        for blocking in (True, False):
            with pytest.raises(CheckpointError, match="could not write the checkpoint"):
                fabric.save(path, state, blocking=blocking).wait()
    train(fabric, model, optimizer)
    fabric.save(f"{folder}/possible", state)
    fabric._connected.forget()


def of_a_bigger_world(fabric: Fabric, folder: str) -> None:
    path = f"{folder}/bigger"
    model, optimizer = made(fabric, 2, Net)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    found, saved = fabric.state_dict(model, optimizer), read_checkpoint(path)
    if fabric.is_global_zero:
        refuse_difference(list(found), [saved["model"], saved["optimizer"]], path)
    train(fabric, model, optimizer)
    fabric._connected.forget()


def run(fabric: Fabric, folder: str) -> None:
    for program in (two_models, frozen_with_adapter, tied, changed, impossible_places, of_a_bigger_world):
        program(fabric, folder)


def save(fabric: Fabric, folder: str) -> None:
    model, optimizer = made(fabric, 1, Net)
    train(fabric, model, optimizer)
    fabric.save(f"{folder}/bigger", {"model": model, "optimizer": optimizer})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("programs")
    Fabric(accelerator=ACCELERATOR, strategy="fsdp", devices=3).launch(save, str(folder))
    (folder / "file").touch()
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_save_and_load_what_they_have_and_learn_what_does_not_fit(strategy: str, folder: str) -> None:
    Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2).launch(run, folder)


class WithHistory(Net):
    """A model whose state has a nest with a tensor besides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.history: Any = {}

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


def extra_state(fabric: Fabric, path: str) -> None:
    model, _ = made(fabric, 1, WithHistory)
    inner: Any = model
    inner.history = {"losses": [torch.arange(3.0)], "num_calls": 7}
    fabric.save(path, {"model": model})
    inner.history = {}
    fabric.load(path, {"model": model})
    assert inner.history["num_calls"] == 7
    (losses,) = inner.history["losses"]
    assert losses.tolist() == [0, 1, 2]
    if sys.platform == "linux":
        assert path not in Path("/proc/self/maps").read_text(), "the extra state is mapped from the file"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_3", "ddp_fully_sharded"])
def test_tensors_within_an_extra_state_are_read_into_memory(strategy: str, tmp_path: Path) -> None:
    Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=1).launch(extra_state, str(tmp_path / "saved"))


def save_on_rank_zero(fabric: Fabric, folder: str) -> None:
    model, optimizer = made(fabric, 1, Net)
    train(fabric, model, optimizer)
    if fabric.is_global_zero:
        fabric.save(f"{folder}/alone", {"model": model, "optimizer": optimizer})  # as a callback of rank 0 would
    train(fabric, model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_on_rank_zero_alone_raises_and_names_the_call_of_each_rank(strategy: str, tmp_path: Path) -> None:
    fabric = Fabric(accelerator=ACCELERATOR, strategy=strategy, devices=2, report_after_seconds=2)
    with pytest.raises(WorkerError, match="did not make the same call") as raised:
        fabric.launch(save_on_rank_zero, str(tmp_path))
    assert "in save_on_rank_zero" in str(raised.value)
    assert "in train" in str(raised.value)


class Renamed(nn.Linear):
    """Its weight has another name in its state, and it has a buffer of its own dtype."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_state_dict_post_hook(self.rename)
        self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    @staticmethod
    def rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


class Transposed(nn.Linear):
    """Its state has the transposed weight."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t()


def renamed(fabric: Fabric, path: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Renamed(), nn.Linear(3, 3))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    model = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))[0]
    fabric.save(path, {"model": model})
    saved = dict(read_checkpoint(path)["model"])
    refuse_difference(saved, plain, "saved")
    refuse_difference(dict(fabric.state_dict(model, all_ranks=True)), plain, "gathered")
    refuse_difference(dict(model.state_dict()), plain, "of the module")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fabric.load(path, {"model": model})
    refuse_difference(dict(fabric.state_dict(model, all_ranks=True)), plain, "loaded")


@pytest.mark.slow
def test_parameters_that_a_hook_renames_are_saved_whole_and_buffers_keep_their_dtypes(tmp_path: Path) -> None:
    Fabric(accelerator=ACCELERATOR, strategy="ddp_fully_sharded", devices=2).launch(renamed, str(tmp_path))


def transposed(fabric: Fabric, path: str) -> None:
    model = nn.Sequential(Transposed(4, 3))
    model = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))[0]
    with pytest.raises(RuntimeError, match=r"'0\.weight' in the state of `Sequential` was computed from a parameter"):
        fabric.save(path, {"model": model})


@pytest.mark.slow
def test_weights_that_a_module_computes_for_its_state_raise_where_they_are_released(tmp_path: Path) -> None:
    Fabric(accelerator=ACCELERATOR, strategy="deepspeed_stage_3", devices=1).launch(transposed, str(tmp_path))
