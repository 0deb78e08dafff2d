"""Loggers with Lightning Fabric's arguments, and loggers that come later."""

from __future__ import annotations

import csv
import importlib
import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR

import fabric as core
from fabric.lightning import Fabric
from fabric.lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from fabric.lightning.utilities.rank_zero import rank_zero_only


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


class Recorder:
    """Somebody's logger."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.calls.append(params)


def test_a_csv_logger_has_its_version_and_directory_before_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "version_4").mkdir()
    logger = CSVLogger(root_dir=tmp_path, name=None, flush_logs_every_n_steps=1)
    assert (logger.name, logger.version, logger.log_dir) == ("", 5, str(tmp_path / "version_5"))
    assert logger.root_dir == str(tmp_path)
    assert not Path(logger.log_dir).exists()
    Path(logger.log_dir).mkdir()  # as a program does that keeps its own files there
    logger.log_metrics({"loss": torch.tensor(0.5), "step": 7})
    logger.log_metrics({"loss": 0.25, "accuracy": 1}, step=3)
    logger.save()
    logger.finalize("success")
    assert rows(logger) == [
        {"step": "0", "loss": "0.5", "accuracy": ""},
        {"step": "3", "loss": "0.25", "accuracy": "1"},
    ]


def test_names_versions_and_prefixes_are_that_librarys(tmp_path: Path) -> None:
    assert CSVLogger(tmp_path).log_dir == str(tmp_path / "lightning_logs" / "version_0")
    logger = CSVLogger(tmp_path, "a", "final", prefix="train")
    logger.log_metrics({"loss": 1.0}, 0)
    assert logger.log_dir == str(tmp_path / "a" / "final")
    assert rows(logger) == [{"step": "0", "train-loss": "1.0"}]
    with pytest.raises(FileExistsError, match=r"may hold the metrics of another run\. Leave `version` out"):
        CSVLogger(tmp_path, "a", "final").log_metrics({"loss": 1.0}, 0)
    with pytest.raises(ValueError, match="`flush_logs_every_n_steps=0`: write a number from 1 on"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


def test_tensorboard_takes_metrics_settings_and_pickles(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name=None, sub_dir="x", flush_secs=1)
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 4}})
    logger.log_metrics({"loss": torch.tensor(0.5)}, 1)
    logger.finalize("success")
    assert list(Path(logger.log_dir).glob("events.out.*"))
    assert logger.log_dir == str(tmp_path / "version_0" / "x")
    assert pickle.loads(pickle.dumps(logger)).log_dir == logger.log_dir


@pytest.mark.parametrize("make", [Fabric, core.Fabric], ids=["lightning", "core"])
def test_loggers_may_be_appended_after_launch_and_take_settings(make: Any, tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    with make(accelerator=ACCELERATOR, devices=1, loggers=first) as fabric:
        fabric.launch()
        fabric.log("a", 1)
        fabric.loggers.append(second)
        fabric.log_dict({"b": torch.tensor(2)}, step=4)
        fabric.log_hyperparams({"lr": 0.1})
        assert fabric.logger is first
        with pytest.raises(ValueError, match=r"`fabric\.log\('pair', \.\.\.\)`: a tensor of \(2,\) is no number"):
            fabric.log("pair", torch.ones(2))
        fabric.loggers.append(object())
        with pytest.raises(TypeError, match=r"A logger has `log_metrics\(metrics, step=None\)`"):
            fabric.log("c", 3)
    assert first.calls[:3] == [({"a": 1}, None), ({"b": 2}, 4), {"lr": 0.1}]
    assert second.calls[:2] == [({"b": 2}, 4), {"lr": 0.1}]


def test_loggers_can_be_assigned_and_may_be_empty() -> None:
    recorder = Recorder()
    with Fabric(ACCELERATOR, devices=1) as fabric:
        with pytest.raises(IndexError, match=r"there is no logger\. Pass one to `Fabric\(loggers=\.\.\.\)`"):
            _ = fabric.logger
        fabric.log_hyperparams({"lr": 0.1})
        fabric.loggers = [recorder]
        fabric.log("a", 1)
    assert recorder.calls == [({"a": 1}, None)]


@pytest.mark.parametrize("kind", [core.CSVLogger, CSVLogger], ids=["core", "lightning"])
def test_settings_are_a_file_beside_the_rows(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path, name="")
    logger.log_hyperparams({"lr": 0.1, "data": Path("a")})
    logger.log_metrics({"loss": 1.0}, 0)
    text = (tmp_path / "version_0" / "hyperparameters.json").read_text()
    assert json.loads(text) == {"lr": 0.1, "data": "a"}
    assert (tmp_path / "version_0" / "metrics.csv").read_text() == "step,loss\n0,1.0\n"


def test_settings_may_be_a_namespace(tmp_path: Path) -> None:
    CSVLogger(tmp_path, name=None).log_hyperparams(Namespace(lr=0.1))
    assert json.loads((tmp_path / "version_0" / "hyperparameters.json").read_text()) == {"lr": 0.1}


def test_every_class_that_takes_metrics_is_a_logger(tmp_path: Path) -> None:
    for logger in (CSVLogger(tmp_path), core.CSVLogger(tmp_path), Recorder()):
        assert isinstance(logger, Logger)
    assert not isinstance("csv", Logger)


def test_on_another_rank_loggers_and_decorated_functions_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29400}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    assert rank_zero_only.rank == 1
    CSVLogger(tmp_path).log_metrics({"loss": 1.0}, 0)
    TensorBoardLogger(tmp_path).experiment.add_scalar("loss", 1.0)
    assert rank_zero_only(lambda: "said")() is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert rank_zero_only(lambda: "said")() == "said"


NAMES = {
    "": ("Fabric", "seed_everything", "is_wrapped"),
    "fabric": ("Fabric",),
    "wrappers": ("_FabricModule", "_FabricOptimizer", "_FabricDataLoader", "is_wrapped"),
    "accelerators": ("Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator", "XLAAccelerator")
    + ("find_usable_cuda_devices", "num_cuda_devices", "is_cuda_available"),
    "connector": ("_PRECISION_INPUT", "_PLUGIN_INPUT"),
    "loggers": ("CSVLogger", "Logger", "TensorBoardLogger", "rank_zero_experiment"),
    "plugins": ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision", "FSDPPrecision", "XLAPrecision")
    + ("BitsandbytesPrecision", "CheckpointIO", "TorchCheckpointIO", "ClusterEnvironment"),
    "plugins.environments": ("ClusterEnvironment", "SLURMEnvironment", "TorchElasticEnvironment", "MPIEnvironment"),
    "strategies": ("DDPStrategy", "DataParallelStrategy", "DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")
    + ("ParallelStrategy", "SingleDeviceStrategy", "Strategy", "XLAFSDPStrategy", "XLAStrategy"),
    "strategies.fsdp": ("FSDPStrategy",),
    "strategies.model_parallel": ("ModelParallelStrategy",),
    "strategies.deepspeed": ("DeepSpeedStrategy",),
    "strategies.strategy": ("Strategy",),
    "utilities": ("rank_zero_only", "rank_zero_info", "rank_zero_warn", "AttributeDict", "move_data_to_device")
    + ("ThroughputMonitor", "measure_flops", "seed_everything", "suggested_max_num_workers"),
    "utilities.rank_zero": ("rank_zero_only", "rank_zero_debug", "rank_zero_deprecation"),
    "utilities.seed": ("seed_everything",),
    "utilities.throughput": ("Throughput", "ThroughputMonitor", "measure_flops"),
    "utilities.types": ("ReduceOp", "_PATH", "_Stateful", "ProcessGroup"),
}


@pytest.mark.parametrize("module", NAMES)
def test_names_can_be_imported_from_the_same_modules_as_in_lightning_fabric(module: str) -> None:
    found = importlib.import_module(f"fabric.lightning.{module}".removesuffix("."))
    assert [name for name in NAMES[module] if name not in vars(found)] == []


def test_suggested_max_num_workers_is_the_process_share_of_the_cores() -> None:
    from fabric.lightning.utilities import suggested_max_num_workers

    assert suggested_max_num_workers(1) >= suggested_max_num_workers(2) >= 1
    with pytest.raises(ValueError, match=r"`suggested_max_num_workers\(0\)`: write a number of processes from 1 on"):
        suggested_max_num_workers(0)


def test_an_attribute_dict_reads_and_writes_entries() -> None:
    from fabric.lightning.utilities import AttributeDict

    state = AttributeDict(step=1)
    state.step += 1
    state.loss = 0.5
    del state.loss
    assert state == {"step": 2}
    with pytest.raises(AttributeError, match="There is no entry 'loss'; there are 'step'"):
        _ = state.loss
