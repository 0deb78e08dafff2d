from __future__ import annotations

import csv
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import template

from fabric import CSVLogger, Fabric, TensorBoardLogger
from fabric.output.logger import Logger, metric_writer

# Other people's loggers, by the signatures that they have


class LightningLike:
    """`lightning.pytorch.loggers.Logger`."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.written.append((metrics, step))


class MLflowLike(LightningLike):
    """The module `mlflow`."""

    def log_metrics(  # type: ignore[override]
        self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None, run_id: Any = None
    ) -> None:
        self.written.append((metrics, step))


class CometLike(LightningLike):
    """`comet_ml.Experiment`: `step` is not the second argument."""

    def log_metrics(  # type: ignore[override]
        self, dic: dict[str, Any], prefix: str | None = None, step: int | None = None, epoch: int | None = None
    ) -> None:
        assert prefix is None
        self.written.append((dic, step))


class WandbLike:
    """A run of Weights & Biases."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, float], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.written.append((data, step))


@pytest.mark.parametrize("kind", [LightningLike, MLflowLike, CometLike, WandbLike])
def test_other_peoples_loggers_are_taken_as_they_are(kind: type[Any]) -> None:
    logger = kind()
    write = metric_writer(logger)
    write({"loss": 0.5}, step=3)
    write({"loss": 0.25}, step=None)
    assert logger.written == [({"loss": 0.5}, 3), ({"loss": 0.25}, None)]


def test_a_logger_with_both_methods_is_given_metrics_once() -> None:
    class Both(LightningLike):
        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise AssertionError

    logger = Both()
    metric_writer(logger)({"loss": 1.0}, step=0)
    assert logger.written == [({"loss": 1.0}, 0)]


@pytest.mark.parametrize("logger", ["csv", object()], ids=["a string", "an object"])
def test_what_is_no_logger_is_an_error_that_says_what_is_missing(logger: object) -> None:
    with pytest.raises(TypeError, match=r"`loggers` holds .*, a `\w+`\. A logger has") as caught:
        Fabric(accelerator="cpu", devices=1, loggers=logger)
    assert "A logger has `log_metrics(metrics, step=None)` or `log(metrics, step=None)`" in str(caught.value)
    assert str(caught.value).endswith("Write one of them: the metrics are a dict of numbers by name.")


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_ours_pickle_and_make_nothing_before_the_first_metric(kind: Any, tmp_path: Path) -> None:
    logger: Logger = kind(tmp_path / "runs", name="mine")
    copy = pickle.loads(pickle.dumps(logger))
    assert not (tmp_path / "runs").exists()
    copy.log_metrics({"loss": 1.0}, 0)
    assert [path.name for path in (tmp_path / "runs" / "mine").iterdir()] == ["version_0"]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_each_run_has_a_version_of_its_own(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "version_7").mkdir()
    (tmp_path / "version_old").mkdir()
    loggers = [kind(tmp_path), kind(tmp_path), kind(tmp_path, version="final"), kind(tmp_path, name="a", version=3)]
    for logger in loggers:
        logger.log_metrics({"loss": 1.0}, 0)
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/*") if path.is_dir()}
    assert made == {"version_7", "version_old", "version_8", "version_9", "final", "a", "a/version_3"}


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_version_that_exists_is_an_error(kind: Any, tmp_path: Path) -> None:
    directory = tmp_path / "mine" / "version_2"
    directory.mkdir(parents=True)
    with pytest.raises(FileExistsError) as raised:
        kind(tmp_path, name="mine", version=2).log_metrics({"loss": 1.0}, 0)
    assert str(raised.value) == (
        f"`version=2` of a logger: `{directory}` exists, and may hold another run's metrics. Leave `version` out for "
        "the next free number, or write one that is free."
    )


# CSV


def rows_of(logger: CSVLogger) -> list[dict[str, str]]:
    assert logger.file is not None
    with logger.file.open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_rows_read_back_as_the_numbers_that_they_were(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    values = [1 / 3, 1e-300, -0.0, math.inf, math.nan, 12345678901234567890]
    for step, value in enumerate(values):
        logger.log_metrics({"value": value}, step)
    for step, (row, value) in enumerate(zip(rows_of(logger), values, strict=True)):
        assert int(row["step"]) == step
        assert repr(type(value)(row["value"])) == repr(value)


def test_new_metrics_get_columns_and_old_rows_empty_cells(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"loss": 0.5, 'odd, "name"\nof two lines': 2}, 1)
    logger.log_metrics({"accuracy": 0.9})
    assert logger.file is not None
    assert rows_of(logger) == [
        {"step": "0", "loss": "1.0", 'odd, "name"\nof two lines': "", "accuracy": ""},
        {"step": "1", "loss": "0.5", 'odd, "name"\nof two lines': "2", "accuracy": ""},
        {"step": "", "loss": "", 'odd, "name"\nof two lines': "", "accuracy": "0.9"},
    ]
    assert [path.name for path in logger.file.parent.iterdir()] == ["metrics.csv"]


def test_metrics_of_one_step_are_one_row(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path)) as fabric:
        for step in range(2):
            fabric.log_dict({"loss": 1 / (3 + step)}, step)
            fabric.log_dict({"accuracy": 0.5, "long, name": 10.0**step}, step)
            fabric.log("rate", 0.25, step)
        fabric.log("rate", 0.125, 1)  # once more: a row of its own
        fabric.log("loss", 2, 1)
        fabric.log("loss", 3)
        fabric.log("rate", 4)  # without a step, nothing says that they belong together
        assert fabric.logger.file.read_text() == (
            'step,loss,accuracy,"long, name",rate\n'
            f"0,{1 / 3},0.5,1.0,0.25\n"
            "1,0.25,0.5,10.0,0.25\n"
            "1,2,,,0.125\n"
            ",3,,,\n"
            ",,,,4\n"
        )


def test_the_file_is_written_anew_only_where_names_are_new(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1, "b": 1}, 0)
    assert logger.file is not None
    first = logger.file.stat().st_ino
    for step in range(50):
        logger.log_metrics({"a": 1} if step % 2 else {"b": 1}, step)
        logger.log_metrics({"b": 1} if step % 2 else {"a": 1}, step)
    assert logger.file.stat().st_ino == first


def test_a_copy_goes_on_in_the_same_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    pickle.loads(pickle.dumps(logger)).log_metrics({"a": 2}, 1)
    assert [row["a"] for row in rows_of(logger)] == ["1", "2"]


def test_a_metric_may_not_bear_the_name_of_the_first_column(tmp_path: Path) -> None:
    words = "A metric is named 'step', which is the name of the first column. Give it another name."
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        CSVLogger(tmp_path).log_metrics({"step": 1})


LOG_FOR_EVER = """
import sys, itertools
from fabric.output.csv_logger import CSVLogger
logger = CSVLogger(sys.argv[1], version="killed")
for step in itertools.count():
    logger.log_metrics({"loss": step / 3}, step)
    logger.log_metrics({f"name_{step // 100 % 8}": 1e-300 * step}, step)
    if step == 500:
        print("logging", flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_whole_rows(tmp_path: Path) -> None:
    for trial in range(3):
        root = tmp_path / str(trial)
        command = [sys.executable, "-c", LOG_FOR_EVER, str(root)]
        with template.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"logging\n"
            process.send_signal(signal.SIGKILL)
        text = (root / "killed" / "metrics.csv").read_text()
        assert text.endswith("\n")
        header, *rows = csv.reader(text.splitlines())
        assert [int(row[0]) for row in rows] == list(range(len(rows)))
        assert len(rows) > 500
        assert {len(row) for row in rows} == {len(header)}
        assert [float(row[1]) for row in rows] == [step / 3 for step in range(len(rows))]


# TensorBoard


def scalars_of(directory: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        (value.tag, event.step, value.simple_value)
        for file in directory.glob("events.*")
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]


@pytest.mark.slow
def test_scalars_are_on_disk_before_the_logger_is_closed(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 0.5, "accuracy": 0.25}, 3)
    logger.log_metrics({"loss": 0.125}, 4)
    assert scalars_of(tmp_path / "version_0") == [("loss", 3, 0.5), ("accuracy", 3, 0.25), ("loss", 4, 0.125)]


@pytest.mark.slow
def test_hyperparameters_are_those_of_the_tab_hparams_where_all_scalars_are_compared(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.plugins.hparams import metadata

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "model": {"depth": 3, "norm": None}})
    (file,) = (tmp_path / "version_0").glob("events.*")
    values = {value.tag: value for event in LegacyEventFileLoader(str(file)).Load() for value in event.summary.value}
    assert metadata.EXPERIMENT_TAG not in values, "which would name the metrics, and there are none yet"
    content = values[metadata.SESSION_START_INFO_TAG].metadata.plugin_data.content
    written = metadata.parse_session_start_info_plugin_data(content).hparams
    assert {name: value.WhichOneof("kind") for name, value in written.items()} == {
        "lr": "number_value", "model/depth": "number_value", "model/norm": "string_value",
    }  # fmt: skip


WITH_AN_OPEN_RUN = """
import wandb
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, launcher="script")
early = EARLY and wandb.init()
fabric.launch()
if fabric.is_global_zero:
    fabric.loggers.append(early or wandb.init())
fabric.log("loss", 0.5)
fabric.barrier()
"""
WANDB = """
run = None
class Run:
    def log(self, metrics, step=None):
        print("logged", metrics)
def init():
    global run
    run = Run()
    print("opened")
    return run
"""


@pytest.mark.slow
def test_a_run_of_wandb_that_is_open_before_the_launch_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    for is_early, num_runs in ((True, 3), (False, 1)):
        (tmp_path / "train.py").write_text(WITH_AN_OPEN_RUN.replace("EARLY", str(is_early)))
        command = [sys.executable, "train.py"]
        ended = template.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.decode().count("opened") == num_runs
        assert ended.stdout.decode().count("logged {'loss': 0.5}") == 1
        assert ended.stderr.decode().count("`wandb.init()` ran before `fabric.launch()`") == is_early


LOG_IN_A_FORK = """
import os, sys
from fabric.output.tensorboard_logger import TensorBoardLogger
logger = TensorBoardLogger(sys.argv[1])
logger.log_metrics({"where": 0.0}, 0)
child = os.fork()
for step in range(50):
    logger.log_metrics({"where": float(child == 0)}, step)
if child == 0:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_fork_of_an_open_logger_begins_a_run_of_its_own(tmp_path: Path) -> None:
    template.run([sys.executable, "-c", LOG_IN_A_FORK, str(tmp_path)], check=True, timeout=60)
    assert {value for _, _, value in scalars_of(tmp_path / "version_0")} == {0.0}
    assert [value for _, _, value in scalars_of(tmp_path / "version_1")] == [1.0] * 50


@pytest.mark.slow
def test_without_tensorboard_the_error_names_the_extra() -> None:
    program = (
        "import sys\nsys.modules['tensorboard'] = None\n"
        "from fabric.output.tensorboard_logger import TensorBoardLogger\nTensorBoardLogger('runs')\n"
    )
    ended = template.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=60, env=os.environ)
    assert ended.stderr.decode().splitlines()[-1] == (
        "ModuleNotFoundError: `TensorBoardLogger` needs tensorboard, which is not installed. "
        "Run `pip install 'torchfabric[loggers]'`, or write a file of rows with `CSVLogger`."
    )
