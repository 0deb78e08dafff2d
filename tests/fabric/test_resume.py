"""A run that is stopped and resumed repeats, bit for bit, the losses of one that never stopped."""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric import Fabric, read_checkpoint, seed_everything

NUM_EPOCHS = 2


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 52

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index / 52) + torch.rand(4) + random.random() + float(np.random.rand()), index


def train(fabric: Fabric, path: str, stops: list[int], batch_size: int, num_workers: int) -> list[Any]:
    """Windows of two micro-batches; the run ends after each of `stops` batches, and a new one goes on from its file."""
    losses, indices, scales = list[float](), list[list[int]](), list[float]()
    for attempt, stop in enumerate([*stops, None]):
        seed_everything(1 + attempt)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=ExponentialLR(optimizer, 0.9))
        data = DataLoader(Augmented(), batch_size, shuffle=True, num_workers=num_workers)
        loader = fabric.setup_dataloaders(data)
        state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "number": 0}
        if attempt:
            fabric.load(path, state)
        fabric._connected.objects.schedulers[:] = [weakref.ref(scheduler)]
        number = state["number"]
        for epoch in range(state["epoch"], NUM_EPOCHS):
            for inputs, samples in loader:
                number += 1
                with fabric.no_backward_sync(model, enabled=number % 2 == 1):
                    loss = (model(inputs) + torch.rand(())).square().mean()
                    fabric.backward(loss / 2)
                losses.append(loss.item())
                indices.append(samples.tolist())
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                if number == stop:
                    break
            if number == stop:
                fabric.save(path, {**state, "epoch": epoch, "number": number})
                break
        scaler = fabric._connected.runtime.loss_scaler
        scales.append(scaler.scale if scaler is not None else 1.0)
        fabric._connected.forget()
    return fabric.collective.all_gather_object((losses, indices, scales[-1]))


def trained(path: Path, devices: int, precision: str, stops: list[int], num_workers: int) -> Any:
    strategy = "ddp" if devices > 1 else "single_device"
    with Fabric(accelerator=ACCELERATOR, devices=devices, strategy=strategy, precision=precision) as fabric:
        return fabric.launch(train, str(path / "file"), stops, 8 // devices, num_workers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the scaler skips the first steps
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("devices", "precision"), [(1, "32-true"), (2, "32-true"), (2, "16-mixed")])
def test_a_run_stopped_several_times_repeats_the_losses_of_one_that_never_stopped(
    tmp_path: Path, devices: int, precision: str, num_workers: int
) -> None:
    whole = trained(tmp_path, devices, precision, [], num_workers)
    stops = sorted(random.sample(range(2, 14, 2), 3))
    assert trained(tmp_path, devices, precision, stops, num_workers) == whole, stops
    if precision == "16-mixed":
        assert whole[0][2] != 2.0**16  # the scaler's state is in it
    if devices > 1:
        assert whole[0][0] != whole[1][0]


@pytest.fixture
def fabric() -> Any:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision="16-mixed") as fabric:
        yield fabric


def prepared(fabric: Fabric) -> dict[str, Any]:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=ExponentialLR(optimizer, 0.9))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_generators_loss_scale_and_schedulers_are_saved_without_being_named(fabric: Fabric, tmp_path: Path) -> None:
    state = prepared(fabric)
    scheduler, scaler = state.pop("scheduler"), fabric._connected.runtime.loss_scaler
    assert scaler is not None
    scaler.scale, scheduler.last_epoch = 4.0, 7
    fabric.save(tmp_path / "file", state)
    drawn = torch.rand(()), random.random(), np.random.rand()
    scaler.scale, scheduler.last_epoch = 8.0, 9
    fabric.load(tmp_path / "file", {"model": state["model"]})  # weights alone
    assert (scaler.scale, scheduler.last_epoch) == (8.0, 9)
    assert random.random() != drawn[1]
    assert fabric.load(tmp_path / "file", state) == {}
    assert (scaler.scale, scheduler.last_epoch) == (4.0, 7)
    assert (torch.rand(()), random.random(), np.random.rand()) == drawn


def test_a_scheduler_that_the_state_names_is_saved_under_its_name_alone(fabric: Fabric, tmp_path: Path) -> None:
    state = prepared(fabric)
    fabric.save(tmp_path / "file", state)
    written = read_checkpoint(tmp_path / "file")
    assert written["scheduler"]["gamma"] == 0.9
    assert written["fabric"]["schedulers"] == []


def test_a_file_without_the_state_of_a_run_leaves_it_unchanged_and_reports_that(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = prepared(fabric)
    torch.save({"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}, tmp_path / "file")
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "fabric"):
        fabric.load(tmp_path / "file", {"model": state["model"], "optimizer": state["optimizer"]})
    assert torch.equal(torch.get_rng_state(), before)
    assert "The checkpoint has no states of random generators, loss scales and schedulers" in caplog.text


def loaders_of(fabric: Fabric) -> tuple[Any, Any]:
    """For training, and for evaluation."""
    data: Any = range(12)
    training, evaluation = DataLoader(data, 2, shuffle=True), DataLoader(data, 4)
    return fabric.setup_dataloaders(training), fabric.setup_dataloaders(evaluation, use="validate")


def samples_in(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_positions_of_loaders_and_the_number_of_steps_are_saved_without_being_named(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, scaler = prepared(fabric), fabric._connected.runtime.loss_scaler
    assert scaler is not None
    scaler.scale = 1.0  # no step is skipped
    training, evaluation = loaders_of(fabric)
    batches = iter(training)
    for _ in range(3):
        next(batches)
        fabric.backward(state["model"](torch.ones(1, 2)).sum())
        state["optimizer"].step()
    samples_in(evaluation)
    fabric.save(tmp_path / "file", state)
    rest, following = samples_in(batches), samples_in(training)
    assert len(rest) == 3
    fabric._connected.forget()

    torch.manual_seed(1)
    state = prepared(fabric)
    training, evaluation = loaders_of(fabric)
    with caplog.at_level(logging.WARNING, "fabric"):
        fabric.load(tmp_path / "file", {"model": state["model"]})  # weights alone
        assert len(samples_in(training)) == 6
        assert not caplog.messages
        early = iter(training)
        fabric.load(tmp_path / "file", state)
    assert caplog.messages == [
        "Loader 1 of the run (`DataLoader`) continues epoch 0 after 6 samples. To start its epoch from the beginning, "
        "pass `resume_loaders=False` to `load`."
    ]
    assert fabric.num_steps == 3
    assert samples_in(early) == rest
    assert samples_in(training) == following
    assert len(samples_in(evaluation)) == 3


def test_loaders_start_their_epoch_where_they_are_not_to_be_resumed(fabric: Fabric, tmp_path: Path) -> None:
    state, loader = prepared(fabric), loaders_of(fabric)[0]
    batches = iter(loader)
    next(batches), next(batches)
    fabric.save(tmp_path / "file", state)
    del batches
    fabric.load(tmp_path / "file", state, resume_loaders=False)
    assert len(samples_in(loader)) == 6


def test_a_loader_that_the_state_names_is_saved_under_its_name_alone(fabric: Fabric, tmp_path: Path) -> None:
    state, (training, evaluation) = prepared(fabric), loaders_of(fabric)
    next(iter(training))
    fabric.save(tmp_path / "file", {**state, "loader": training})
    saved = read_checkpoint(tmp_path / "file")
    assert saved["loader"]["cursor"]["epoch"] == 0
    assert len(saved["fabric"]["loaders"]) == 1
    del training, evaluation
    gc.collect()
    fabric.save(tmp_path / "file", state)
    assert read_checkpoint(tmp_path / "file")["fabric"]["loaders"] == []


def test_a_loader_that_the_program_iterates_over_goes_on_when_an_earlier_checkpoint_is_loaded(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, loader = prepared(fabric), loaders_of(fabric)[0]
    numbers = []
    for number, _ in enumerate(loader):
        numbers.append(number)
        if number == 2:
            fabric.save(tmp_path / "file", state)
        if number == 4:
            with caplog.at_level(logging.WARNING, "fabric"):
                fabric.load(tmp_path / "file", state)
    assert numbers == [*range(6)]
    assert caplog.messages == ["Loader 1 of the run was not restored: the program is iterating over it. It goes on."]
    assert len(samples_in(loader)) == 6


def test_positions_of_other_loaders_are_not_restored_and_a_message_says_why(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, loaders = prepared(fabric), loaders_of(fabric)
    next(iter(loaders[0]))
    fabric.save(tmp_path / "file", state)
    fabric._connected.forget()
    state = prepared(fabric)
    with caplog.at_level(logging.WARNING, "fabric"):
        fabric.load(tmp_path / "file", state)
        other: Any = range(14)
        loaders = tuple(map(fabric.setup_dataloaders, (DataLoader(other), DataLoader(other, sampler=range(12)))))
        fabric.load(tmp_path / "file", state)
    assert "has the positions of 2 data loaders that the saved state did not name, and this run has 0" in caplog.text
    assert "Loader 1 of the run was not restored: The checkpoint has the position of a loader over 12" in caplog.text
    assert [len(samples_in(loader)) for loader in loaders] == [14, 12]


def test_a_loader_over_longer_data_cannot_read_the_rest_of_an_epoch(fabric: Fabric, tmp_path: Path) -> None:
    state, loader = prepared(fabric), loaders_of(fabric)[0]
    batches = iter(loader)
    next(batches), next(batches)
    fabric.save(tmp_path / "file", state)
    fabric._connected.forget()
    data: Any = range(14)
    state, loader = prepared(fabric), fabric.setup_dataloaders(DataLoader(data, 2))
    words = r"over 12 samples, and this `DataLoader` has 14.+Or pass `resume_loaders=False` to `load`: all epochs start"
    with pytest.raises(ValueError, match=words):
        fabric.load(tmp_path / "file", state)
    fabric.load(tmp_path / "file", state, resume_loaders=False)
    assert len(samples_in(loader)) == 7


def test_a_loader_that_a_thread_reads_is_left_out_of_checkpoints_with_one_message(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, (training, evaluation) = prepared(fabric), loaders_of(fabric)
    for loader in (training, evaluation):
        thread = threading.Thread(target=samples_in, args=(loader,))
        thread.start()
        thread.join()
    with caplog.at_level(logging.WARNING, "fabric"):
        fabric.save(tmp_path / "file", state)
        fabric.save(tmp_path / "file", state)
    assert [message[:61] for message in caplog.messages] == [
        "Checkpoints leave out the position of loader 1 of the run, a "
    ]
    assert [each is None for each in read_checkpoint(tmp_path / "file")["fabric"]["loaders"]] == [True, False]
    with pytest.raises(RuntimeError, match=r"is not known\. A thread of the program reads it"):
        fabric.save(tmp_path / "file", {**state, "loader": training})


class Unsaveable(IterableDataset[int]):
    """A stream with a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is loaded."""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
def test_loaders_without_a_position_that_can_be_saved_are_left_out_with_one_message(
    fabric: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data: Any = range(12)
    state = prepared(fabric)
    unsaveable, unused = fabric.setup_dataloaders(
        StatefulDataLoader(Unsaveable()), StatefulDataLoader(data, num_workers=1)
    )
    samples_in(unsaveable)
    with caplog.at_level(logging.WARNING, "fabric"):
        fabric.save(tmp_path / "file", state)
        fabric.save(tmp_path / "file", state)
    assert len(caplog.messages) == 1
    assert "The state of loader 1 of the run, a `StatefulDataLoader`, cannot be saved" in caplog.messages[0]
    assert read_checkpoint(tmp_path / "file")["fabric"]["loaders"][0] is None
    fabric.load(tmp_path / "file", state)
    assert len(samples_in(unused)) == 12


def read_own_parts(fabric: Fabric, path: str) -> tuple[list[str], list[list[int]]]:
    """Each rank reads a loader of its own; loads the checkpoint if there is one, else saves it after two batches."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fabric").addHandler(handler)
    net = nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    data: Any = range(100 * fabric.global_rank, 100 * fabric.global_rank + 6)
    loader = fabric.setup_dataloaders(DataLoader(data), use_distributed_sampler=False)
    if Path(path).exists():
        fabric.load(path, {"model": model, "optimizer": optimizer})
    else:
        batches = iter(loader)
        for _ in range(2 + fabric.global_rank):
            next(batches)
        fabric.save(path, {"model": model, "optimizer": optimizer})
        del batches
    logging.getLogger("fabric").removeHandler(handler)
    return fabric.collective.all_gather_object((records, samples_in(loader)))  # type: ignore[return-value]


@pytest.mark.slow
def test_ranks_that_read_parts_of_their_own_resume_each_its_own_and_other_numbers_of_ranks_say_so(
    tmp_path: Path,
) -> None:
    def run(size: int) -> Any:
        with Fabric(accelerator=ACCELERATOR, devices=size, strategy="ddp" if size > 1 else "single_device") as fabric:
            return fabric.launch(read_own_parts, str(tmp_path / "saved"))

    run(2)
    resumed = run(2)
    assert [[*chain(*samples)] for _, samples in resumed] == [[2, 3, 4, 5], [103, 104, 105]]
    ((records, samples),) = run(1)
    assert len(samples) == 6
    assert [each for each in records if "was not restored" in each], records


def test_plain_values_are_saved_and_the_reserved_name_raises(fabric: Fabric, tmp_path: Path) -> None:
    fabric.save(tmp_path / "file", nn.Linear(2, 1).state_dict())
    assert set(read_checkpoint(tmp_path / "file")) == {"weight", "bias"}
    with pytest.raises(ValueError, match="this name is reserved"):
        fabric.save(tmp_path / "file", {"fabric": 1})


def go_on(fabric: Fabric, path: str, stop: int) -> tuple[list[float], list[list[int]]]:
    """From the file, if there is one, up to step `stop` of two epochs: the global loss and samples of each step."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    size = fabric.world_size
    data = [(torch.full((4,), float(number) / 40), number) for number in range(40)]
    loader = fabric.setup_dataloaders(DataLoader(data, 8 // size, shuffle=True))  # type: ignore[arg-type]
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "number": 0}
    if Path(path).exists():
        fabric.load(path, state)
    losses, samples = list[float](), list[list[int]]()
    number = state["number"]
    for epoch in range(state["epoch"], 2):
        for inputs, indices in loader:
            number += 1  # type: ignore[operator]
            loss = model(inputs).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(fabric.all_reduce(loss.detach())))
            samples.append(fabric.all_gather(indices).flatten().tolist())
            if number == stop:
                break
        if number == stop:
            fabric.save(path, {**state, "epoch": epoch, "number": number})
            break
    return losses, samples


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks_and_strategies_in_the_same_global_order(tmp_path: Path) -> None:
    def run(size: int, strategy: str, path: Path, stop: int) -> tuple[list[float], list[list[int]]]:
        with Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy) as fabric:
            return fabric.launch(go_on, str(path), stop)

    whole_losses, whole_samples = run(1, "single_device", tmp_path / "whole", -1)
    losses, samples = list[float](), list[list[int]]()
    for size, strategy, stop in ((2, "ddp", 3), (1, "single_device", 6), (2, "fsdp", 8), (4, "ddp", -1)):
        more_losses, more_samples = run(size, strategy, tmp_path / "parts", stop)
        losses += more_losses
        samples += more_samples
    assert samples == whole_samples
    assert losses == pytest.approx(whole_losses, rel=1e-5)
