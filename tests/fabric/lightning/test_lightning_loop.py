"""A loop written for Lightning Fabric, on one rank: what comes back, and what is taken that the core refuses."""

from __future__ import annotations

import copy
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from processes import run
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

import fabric as core
from fabric.lightning import Fabric, is_wrapped, seed_everything
from fabric.lightning.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from fabric.lightning.plugins import HalfPrecision, MixedPrecision, Precision
from fabric.lightning.strategies import SingleDeviceStrategy
from fabric.lightning.unsupported import UnsupportedError
from fabric.lightning.utilities import ThroughputMonitor, measure_flops
from fabric.lightning.utilities.types import ReduceOp
from fabric.lightning.wrappers import _FabricModule, _FabricOptimizer


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(ACCELERATOR, "auto", 1) as fabric:
        yield fabric


def parts() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
    return model, SGD(model.parameters(), lr=0.1)


def test_the_result_of_setup_has_the_module_and_reads_and_writes_its_attributes(fabric: Fabric) -> None:
    given, optimizer = parts()
    model, prepared = fabric.setup(given, optimizer)
    assert isinstance(model, _FabricModule)
    assert isinstance(prepared, _FabricOptimizer)
    assert prepared is optimizer
    assert model.module is model._forward_module is given
    assert all(map(is_wrapped, (model, prepared)))
    assert not any(map(is_wrapped, (given, SGD(given.parameters()))))
    model.note = "mine"
    assert given.note == model.note == "mine"  # type: ignore[comparison-overlap]
    del model.note
    with pytest.raises(AttributeError, match="no attribute 'note'"):
        _ = model.note


def test_names_of_parameters_buffers_and_submodules_have_no_prefix(fabric: Fabric) -> None:
    given = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = fabric.setup(given)
    assert list(model.state_dict()) == list(given.state_dict())
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert dict(getattr(model, names)()) == dict(getattr(given, names)())
    model.load_state_dict(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict())


def test_train_eval_and_to_reach_the_module(fabric: Fabric) -> None:
    given, _ = parts()
    model = fabric.setup(given)
    assert model.eval() is model
    assert not any(part.training for part in given.modules())
    assert not model.training
    model.train()
    assert model.training
    assert all(part.training for part in given.modules())
    given.eval()
    assert not model.training
    assert next(model.double().parameters()).dtype is torch.float64


def test_a_copy_of_the_wrapper_is_an_independent_model(fabric: Fabric) -> None:
    model = fabric.setup(parts()[0])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert next(twin.module.parameters()).sum() == 0
    assert next(model.parameters()).abs().sum() > 0


def test_gradients_are_clipped_without_naming_the_module(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    fabric.backward(model(torch.ones(2, 3)).sum() * 100, model=model)
    assert fabric.clip_gradients(None, optimizer, max_norm=1.0) > 1
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert norm.item() == pytest.approx(1.0, rel=1e-3)
    stranger = SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ValueError, match=r"the `SGD` has no parameter of a model that was set up\. Pass the model"):
        fabric.clip_gradients(None, stranger, clip_val=1.0)


def test_one_rank_gathers_without_a_leading_dimension_and_reduces_in_place(fabric: Fabric) -> None:
    tensor = torch.arange(3.0)
    assert torch.equal(fabric.all_gather(tensor), tensor)
    assert fabric.all_gather({"a": 1.5, "b": [2, True]})["b"][0].shape == ()
    assert fabric.all_reduce(tensor, reduce_op=ReduceOp.SUM) is tensor
    for operation in ("AVG", None, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        assert fabric.all_reduce(3, reduce_op=operation).item() == 3
    with pytest.raises(ValueError, match="is not a reduction"):
        fabric.all_reduce(tensor, reduce_op=ReduceOp.BAND)
    with pytest.raises(
        ValueError, match=r"`reduce_op='median'` is not a reduction\. Write one of 'avg', 'max', 'mean'"
    ):
        fabric.all_reduce(tensor, reduce_op="median")
    with pytest.raises(UnsupportedError, match=r"pass `fabric\.collective\.split\(\[0, 1\]\)`"):
        fabric.all_gather(tensor, group=object())


def test_a_checkpoint_takes_wrappers_plain_values_and_loaders_without_a_position(
    fabric: Fabric, tmp_path: Path
) -> None:
    model, optimizer = fabric.setup(*parts())
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(4, 3)))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 3}
    fabric.save(tmp_path / "a.ckpt", state)
    assert list(torch.load(tmp_path / "a.ckpt")["model"]) == list(model.module.state_dict())
    fabric.save(tmp_path / "half.ckpt", {"model": model}, filter={"model": lambda name, value: "bias" in name})
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        next(model.parameters()).zero_()
    state["step"] = 0
    assert fabric.load(tmp_path / "a.ckpt", state, weights_only=True) == {}
    assert state == {"model": model, "optimizer": optimizer, "loader": loader, "step": 3}
    torch.testing.assert_close(model.state_dict(), before)
    torch.save(model.state_dict(), tmp_path / "raw.pth")
    fabric.load_raw(tmp_path / "raw.pth", model)
    for load in (fabric.load, fabric.load_raw):
        with pytest.raises(UnsupportedError, match=r"`fabric\.load\w*\(weights_only=False\)` .* `load_state_dict`"):
            load(tmp_path / "a.ckpt", {"model": model}, weights_only=False)
    with pytest.raises(TypeError, match=r"was given a `_FabricModule` as `state`\. Pass a dict"):
        fabric.save(tmp_path / "b.ckpt", model)


class Callback:
    """Hooks with other keywords each."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_after_setup(self, module: Any) -> None:
        self.calls.append(("setup", type(module).__name__))

    def on_after_optimizer_step(self, optimizer: Any, strategy: Any) -> None:
        self.calls.append(("step", type(optimizer).__name__, type(strategy).__name__))

    def on_epoch(self, loss: float) -> None:
        self.calls.append(loss)

    def on_all(self, **kwargs: Any) -> None:
        self.calls.append(kwargs)


def test_a_check_with_a_folder_of_its_own_leaves_the_files_of_a_run_as_they_are(tmp_path: Path) -> None:
    run, check = tmp_path / "run", core.Check()
    run.mkdir()
    (run / "a.ckpt").write_text("mine")
    check.checkpoint_folder = str(tmp_path / "elsewhere")
    with Fabric(ACCELERATOR, "auto", 1, plugins=[check]) as fabric:
        model = fabric.setup(*parts())[0]
        fabric.save(run / "a.ckpt", {"model": model})
        fabric.core.save(run / "b", {"x": 1}, blocking=False).wait()
        fabric.load(os.path.relpath(run / "a.ckpt"), {"model": model})
        assert fabric.core.load(run / "b") == {"x": 1}
    assert [(path.name, path.read_text()) for path in run.iterdir()] == [("a.ckpt", "mine")]


def test_hooks_are_called_by_setup_and_steps_with_the_keywords_they_accept() -> None:
    callback = Callback()
    with Fabric(ACCELERATOR, devices=1, callbacks=callback) as fabric:
        model, optimizer = fabric.setup(*parts())
        fabric.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        fabric.call("on_epoch", loss=0.5, epoch=2)
        fabric.call("on_all", loss=0.5, epoch=2)
        fabric.call("on_nothing", loss=0.5)
    assert callback.calls == [
        ("setup", "_FabricModule"),
        ("step", "SGD", "SingleDeviceStrategy"),
        0.5,
        {"loss": 0.5, "epoch": 2},
    ]
    optimizer.step()
    assert len(callback.calls) == 4, "a hook outlived `close()`"
    assert not is_wrapped(optimizer)


def test_launch_runs_a_function_with_the_fabric_and_a_second_launch_does_nothing() -> None:
    with Fabric(ACCELERATOR, devices=1) as fabric:
        assert fabric.launch(lambda fabric, number, more=0: (fabric, number + more), 2, more=3) == (fabric, 5)
        fabric.launch()
        assert fabric.launch(lambda fabric: fabric.global_rank) == 0
        with pytest.raises(TypeError, match=r"was given a `int`\. Pass a function `\(fabric, \.\.\.\)`"):
            fabric.launch(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the function takes no argument, but is passed the fabric"):
            fabric.launch(lambda: None)


def test_strategy_and_accelerator_answer_isinstance_and_what_the_loop_asks(fabric: Fabric) -> None:
    assert isinstance(fabric.strategy, SingleDeviceStrategy)
    assert isinstance(fabric.accelerator, CPUAccelerator | CUDAAccelerator)
    assert isinstance(fabric.strategy.accelerator, Accelerator)
    assert isinstance(fabric.strategy.precision, Precision)
    assert fabric.strategy.precision.precision == "32-true"
    assert (fabric.strategy.root_device, fabric.strategy.world_size) == (torch.device("cpu"), 1)
    assert (fabric.strategy.global_rank, fabric.strategy.is_global_zero) == (0, True)
    assert fabric.strategy.device_mesh is None
    assert fabric.strategy.broadcast({"a": 1}) == {"a": 1}
    assert fabric.strategy.reduce_boolean_decision(True)
    with pytest.raises(RuntimeError, match=r"was not passed to a `Fabric`.*Use `fabric\.strategy`"):
        _ = SingleDeviceStrategy().root_device


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"precision": None}, "32-true"),
        ({"precision": 16}, "16-mixed"),
        ({"precision": "bf16-true"}, "bf16-true"),
        ({"plugins": MixedPrecision("bf16-mixed", "cpu")}, "bf16-mixed"),
        ({"precision": HalfPrecision("bf16-true")}, "bf16-true"),
    ],
)
def test_a_precision_is_a_string_none_or_a_plugin(arguments: dict[str, Any], word: str) -> None:
    with Fabric(accelerator=CPUAccelerator(), devices=1, **arguments) as fabric:
        assert fabric.strategy.precision.precision == word
        assert fabric.core.precision.name == word


def test_gpu_selects_the_available_gpu_and_the_core_refuses_the_name() -> None:
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="`accelerator='cuda'` cannot be used here"):
            Fabric(accelerator="gpu")
    words = "`accelerator='gpu'` names several kinds of device. Write '(cuda|mps)' for the GPUs? of .*, or 'auto'"
    with pytest.raises(ValueError, match=words):
        core.Fabric(accelerator="gpu")


def test_a_seed_may_be_omitted_and_is_logged_if_verbose(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fabric")
    assert seed_everything() == 0
    first = torch.rand(3)
    assert Fabric.seed_everything(0, workers=False, verbose=False) == 0
    assert torch.equal(first, torch.rand(3))
    assert seed_everything("7") == 7  # type: ignore[arg-type]
    assert caplog.messages == ["Seed set to 0", "Seed set to 7"]


def test_rank_zero_info_is_printed_where_no_handler_is_configured() -> None:
    program = "from fabric.lightning.utilities import rank_zero_info, seed_everything\n"
    program += "rank_zero_info('hello'); seed_everything(7)\n"
    program += "import logging; logging.getLogger('fabric.lightning').setLevel('WARNING'); rank_zero_info('not this')"
    done = run(["-c", program])
    assert done.stderr == "hello\nSeed set to 7\n"


def test_a_filter_and_a_hook_that_are_no_functions_are_named(fabric: Fabric, tmp_path: Path) -> None:
    model = fabric.setup(nn.Linear(2, 1))
    for wrong in ({"model": 5}, ["model"]):
        with pytest.raises(TypeError, match=r"`filter=.*`: write a function for a name"):
            fabric.save(tmp_path / "file", {"model": model}, filter=wrong)  # type: ignore[arg-type]
    with (
        Fabric(accelerator=ACCELERATOR, devices=1, callbacks=Namespace(on_step=3)) as other,
        pytest.raises(TypeError, match=r"`Namespace\.on_step` is a `int`, which cannot be called"),
    ):
        other.call("on_step")


def test_a_model_whose_apply_raises_is_set_up(fabric: Fabric) -> None:
    class Closed(nn.Linear):
        def apply(self, fn: Any) -> Any:
            raise AssertionError

    fabric.setup(nn.Sequential(Closed(2, 1)))


def test_other_methods_of_the_core_can_be_called(fabric: Fabric) -> None:
    assert list(fabric.progress([1, 2])) == [1, 2]
    assert fabric.should_stop is False
    with pytest.raises(AttributeError, match="'Fabric' object has no attribute 'mystery'"):
        _ = fabric.mystery


def test_sharded_model_raises_with_its_present_name(fabric: Fabric) -> None:
    with pytest.raises(UnsupportedError, match=re.escape("Write `fabric.init_module()`.")):
        fabric.sharded_model()


def test_throughput_is_of_the_window_and_of_all_ranks(fabric: Fabric) -> None:
    monitor = ThroughputMonitor(fabric, window_size=2, available_flops=100.0)
    monitor.update(time=1.0, batches=1, samples=4, lengths=40, flops=10)
    assert monitor.compute() == {"time": 1.0, "batches": 1, "samples": 4, "lengths": 40}
    monitor.update(time=3.0, batches=3, samples=12, lengths=120, flops=10)
    rates = monitor.compute_and_log(step=3)
    assert {name: rate for name, rate in rates.items() if name.startswith("device/")} == {
        "device/batches_per_sec": 1.0,
        "device/samples_per_sec": 4.0,
        "device/items_per_sec": 40.0,
        "device/flops_per_sec": 5.0,
        "device/mfu": 0.05,
    }
    with pytest.raises(ValueError, match=r"`update\(time=2\.0\)` after 3\.0: counts are since the beginning"):
        monitor.update(time=2.0, batches=4, samples=16)
    with pytest.raises(ValueError, match="`samples` is at least `batches`, and `lengths` at least `samples`"):
        monitor.update(time=4.0, batches=4, samples=3)
    with pytest.raises(ValueError, match="write a `world_size` from 1, and a `window_size` from 2"):
        ThroughputMonitor(fabric, window_size=1)
    with torch.device("meta"):
        net = nn.Linear(4, 8, bias=False)
        assert measure_flops(net, lambda: net(torch.empty(2, 4))) == 2 * 2 * 4 * 8


def test_a_lightning_module_gets_the_fabric(fabric: Fabric) -> None:
    class Module(nn.Linear):
        """As a LightningModule, whose `log` goes to its fabric."""

        def __init__(self) -> None:
            super().__init__(2, 1)
            self._fabric: Any = None
            self.ended = 0

        def on_epoch_end(self) -> None:
            self.ended += 1

    given = Module()
    fabric.setup(given)
    fabric.call("on_epoch_end")
    assert (given._fabric, given.ended) == (fabric, 1)


def test_a_loader_that_the_state_does_not_name_starts_its_epoch_after_a_load(fabric: Fabric, tmp_path: Path) -> None:
    model, optimizer = fabric.setup(*parts())
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(4, 3)))
    state = {"model": model, "optimizer": optimizer}
    for number, _ in enumerate(loader):
        if number == 1:
            fabric.save(tmp_path / "a.ckpt", state)
            break
    fabric.load(tmp_path / "a.ckpt", state)
    assert len(list(loader)) == 4


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_of_the_program_gets_the_number_of_each_epoch(fabric: Fabric, in_batches: bool) -> None:
    numbers: Any = range(8)
    sampler: Any = DistributedSampler(numbers, num_replicas=1, rank=0)
    batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if in_batches else {"sampler": sampler}
    plain: Any = DataLoader(numbers, **batches)
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append([batch.tolist() for batch in plain])
    loader, other = fabric.setup_dataloaders(plain, DataLoader(numbers))
    assert [[batch.tolist() for batch in loader] for _ in range(3)] == expected
    next(iter(loader))  # is no epoch
    sampler.set_epoch(3)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
    assert len(list(other)) == len(numbers)


ROWS = 24


def losses_of_a_loop(fabric: Fabric | None, num_folds: int) -> list[float]:
    """A k-fold cross-validation (of no folds: a training with a validation), with dropout, from one seed."""
    seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(ROWS, 4), torch.randint(3, (ROWS,)))
    models: list[Any] = []
    for _ in range(max(1, num_folds)):
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
        models.append((net, SGD(net.parameters(), lr=0.1)))
    if fabric is not None:
        models = [fabric.setup(*each) for each in models]
    losses = []
    loaders: Any = [DataLoader(each, 4, shuffle=number == 0) for number, each in enumerate(random_split(data, [16, 8]))]
    if fabric is not None and not num_folds:
        loaders = fabric.setup_dataloaders(*loaders)
    for _ in range(3):
        for fold, (model, optimizer) in enumerate(models):
            if num_folds:
                rows = list(range(ROWS))
                held_out = rows[fold::num_folds]
                parts = ([row for row in rows if row not in held_out], held_out)
                loaders = [DataLoader(data, 4, sampler=SubsetRandomSampler(part)) for part in parts]
                loaders = loaders if fabric is None else fabric.setup_dataloaders(*loaders)
            model.train()
            for inputs, targets in loaders[0]:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                fabric.backward(loss) if fabric is not None else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                losses += [nn.functional.cross_entropy(model(x), y).item() for x, y in loaders[1]]
    return losses


@pytest.mark.parametrize("num_folds", [0, 3])
def test_a_training_and_a_cross_validation_have_the_losses_of_torch(num_folds: int) -> None:
    with Fabric("cpu", devices=1) as fabric:
        assert losses_of_a_loop(fabric, num_folds) == losses_of_a_loop(None, num_folds)


def test_what_was_set_up_is_refused_a_second_time(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    loader = fabric.setup_dataloaders(DataLoader([1, 2]))  # type: ignore[arg-type]
    for again in (
        lambda: fabric.setup(model),
        lambda: fabric.setup_module(model),
        lambda: fabric.setup(torch.compile(model, backend="eager")),
        lambda: fabric.setup_optimizers(optimizer),
        lambda: fabric.setup(nn.Linear(1, 1), optimizer),
        lambda: fabric.setup_dataloaders(loader),
    ):
        with pytest.raises(ValueError, match=r"was set up before|that it returned before"):
            again()
    fabric.setup(copy.deepcopy(model))


def test_what_is_missing_is_found_by_the_classes_of_python(fabric: Fabric, tmp_path: Path) -> None:
    model = fabric.setup(nn.Linear(2, 1))
    for missing in (tmp_path / "nothing", tmp_path / "nothing.ckpt"):
        for load in (lambda path: fabric.load(path, {"model": model}), lambda path: fabric.load_raw(path, model)):
            with pytest.raises(FileNotFoundError, match="There is no such folder") as raised:
                load(missing)
            assert isinstance(raised.value, core.CheckpointError)
    fabric.save(tmp_path / "run", {"model": model})
    with pytest.raises(KeyError, match="missing") as raised_key:
        fabric.load(tmp_path / "run", {"model": model, "step": 1})
    assert isinstance(raised_key.value, core.CheckpointError)
    assert "\n" in str(raised_key.value), "readable, as it is printed"
    with pytest.raises(RuntimeError) as raised_shape:
        fabric.load(tmp_path / "run", {"model": fabric.setup(nn.Linear(3, 1))})
    assert not isinstance(raised_shape.value, KeyError | OSError)


class Dict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": self.layer(x), "count": torch.ones(1, dtype=torch.int64)}

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)["y"].sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "16-true", "bf16-true", "64-true", "32-true"])
def test_inputs_and_outputs_have_the_dtypes_of_that_library(precision: str) -> None:
    with Fabric(ACCELERATOR, devices=1, precision=precision) as fabric:
        model, optimizer = fabric.setup(net := Dict(), SGD(net.parameters(), lr=0.1))
        inputs = torch.ones(1, 2, dtype=torch.float32 if precision == "32-true" else torch.float64)
        found = model(fabric.to_device(inputs))
        assert found["y"].dtype is torch.float32
        assert found["count"].dtype is torch.int64
        model.mark_forward_method("score")
        assert model.score(fabric.to_device(inputs)).dtype is torch.float32
        fabric.backward(found["y"].sum())
        optimizer.step()
        assert model.layer(fabric.to_device(torch.ones(1, 2, dtype=model.dtype))).dtype is model.dtype


def test_device_and_dtype_are_those_of_the_parameters_or_what_the_module_says(fabric: Fabric) -> None:
    model = fabric.setup(nn.Linear(2, 1))
    assert (model.device, model.dtype) == (fabric.device, torch.float32)
    assert model.double().dtype is torch.float64
    own = nn.Linear(2, 1)
    own.device = "mine"  # type: ignore[assignment]
    assert fabric.setup(own).device == "mine"
    assert fabric.setup(nn.Tanh()).dtype is torch.float32


def test_a_loss_may_reach_parameters_of_no_module(fabric: Fabric) -> None:
    alone = nn.Parameter(torch.ones(2, device=fabric.device))
    fabric.backward((2 * alone).sum())
    assert alone.grad is not None
    assert alone.grad.tolist() == [2, 2]
    optimizer = fabric.setup_optimizers(SGD([alone], lr=0.5))
    fabric.backward((2 * alone).sum())
    optimizer.step()
    assert alone.tolist() == [-1, -1]
    model = fabric.setup(nn.Linear(2, 1))
    other = nn.Parameter(torch.ones(2, device=fabric.device))
    fabric.backward((model(alone) + other.sum()).sum())
    assert other.grad is not None
    assert model.weight.grad is not None


def test_methods_that_only_the_core_has_take_the_wrapper(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    average = fabric.ema(model, decay=0.5)
    for window in fabric.accumulate(torch.ones(4, 2, 3, device=fabric.device), 2, model):
        for batch in window:
            fabric.backward(model(batch).sum())
        optimizer.step()
        average.update()
    assert average.num_updates == 2
    assert list(fabric.state_dict(model)) == list(model.state_dict())


def test_a_directory_of_checkpoints_takes_the_core_of_a_fabric(fabric: Fabric, tmp_path: Path) -> None:
    checkpoints, module = core.CheckpointDirectory(tmp_path / "run"), nn.Linear(2, 1)
    model: Any = fabric.setup(module)
    wrong: Any = fabric
    for call in (checkpoints.save, checkpoints.load):
        with pytest.raises(TypeError, match=re.escape("checkpoints.save(fabric.core, {'model': model.module")):
            call(wrong, {"model": model})
    checkpoints.save(fabric.core, {"model": model.module}, step=3)
    assert checkpoints.load(fabric.core, {"model": model.module}) == checkpoints.latest()
