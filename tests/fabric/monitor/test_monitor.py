"""The numbers of `fabric.monitor` against a loop that measures by hand, its file, its table, and bad input."""

import io
import json
import re
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import rich
import torch
from delays import BATCH, WIDTH, Delay, train
from rich.console import Console
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fabric import CSVLogger, Fabric, TensorBoardLogger
from fabric.lightning import Fabric as LightningFabric
from fabric.monitor.flops import ModelFlops, known_peak
from fabric.monitor.table import Table
from fabric.monitor.window import PHASES
from fabric.strategies.collectives.flight_recorder import FlightRecorder


def alone(**options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, sanitize=False, **options)


def flops_of(run: Any) -> int:
    counter = ModelFlops()
    counter.start()
    loss = run()
    counter.is_in_backward = True
    loss.backward()
    return counter.stop()


@pytest.mark.parametrize("recomputes", [False, True])
def test_flops_of_a_linear_layer_are_those_of_the_formula_without_recomputation(recomputes: bool) -> None:
    first, second, x = nn.Linear(8, 16), nn.Linear(16, 4), torch.randn(32, 8)

    def loss() -> torch.Tensor:
        hidden = checkpoint(first, x, use_reentrant=False) if recomputes else first(x)
        return second(hidden.relu()).sum()

    assert flops_of(loss) == 2 * 32 * (2 * 8 * 16 + 3 * 16 * 4)  # the input needs no gradient


def test_flops_of_attention_are_those_of_the_formula() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    count = flops_of(lambda: nn.functional.scaled_dot_product_attention(q, k, v).sum())
    assert count == 6 * (2 * 2 * 4 * 16 * 16 * 8), "two products in forward, four in backward"


def test_evaluation_is_no_part_of_the_flops_of_a_step(tmp_path: Path) -> None:
    fabric = alone()
    model = nn.Linear(8, 4)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    fabric.monitor(tmp_path, window_steps=1, show=False)
    for _ in range(4):
        model.eval()
        with torch.no_grad():
            model(torch.randn(50, 8))
        model.train()
        fabric.backward(model(torch.randn(2, 8)).sum())
        optimizer.step()
    fabric.close()
    lines = map(json.loads, (tmp_path / "monitor.jsonl").read_text().splitlines())
    assert [each["flops_per_step"] for each in lines if each["kind"] == "peak"] == [2 * 2 * (2 * 8 * 4)]


def test_a_save_of_code_for_lightning_fabric_is_seen(tmp_path: Path) -> None:
    fabric = LightningFabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = nn.Linear(8, 4)
    model, _ = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    fabric.core.monitor(tmp_path / "run", show=False)
    fabric.save(tmp_path / "saved.ckpt", {"model": model})
    fabric.close()
    lines = [json.loads(each) for each in (tmp_path / "run/monitor.jsonl").read_text().splitlines()]
    assert [each["path"] for each in lines if each["kind"] == "save"] == [str(tmp_path / "saved.ckpt")]


def test_a_load_is_written_with_the_step_that_it_restores(tmp_path: Path) -> None:
    with alone() as fabric:
        model = nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
        state = {"model": model, "optimizer": optimizer}
        fabric.monitor(tmp_path, show=False)
        for step in range(3):
            fabric.backward(model(torch.ones(3, 2)).sum())
            optimizer.step()
            if step == 1:
                fabric.save(tmp_path / "saved", state)
        fabric.load(tmp_path / "saved", state)
    lines = [json.loads(each) for each in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines if each["kind"] in ("save", "load", "end")] == [2, 2, 2]


def test_peaks_are_those_of_dense_matrices() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16) == (989.4e12, "NVIDIA H100 datasheet, SXM")
    assert known_peak("NVIDIA H100 PCIe", torch.float16) == (756e12, "NVIDIA H100 datasheet, PCIe")
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float32) == (19.5e12, "NVIDIA A100 datasheet")
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float64) is None
    for unknown in ("Pretended", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        assert known_peak(unknown, torch.bfloat16) is None


def test_rates_and_phases_are_those_of_a_loop_that_measures_by_hand(tmp_path: Path) -> None:
    begun: list[float] = []
    """When each `optimizer.step()` began."""

    def late(step: int) -> int:
        begun.append(perf_counter())
        return 0

    metrics = train(alone(), Delay("optimizer", seconds=0.02, late=late), tmp_path, 12, window_steps=10)
    assert metrics["step_seconds"] == pytest.approx((begun[11] - begun[2]) / 9, rel=0.25)
    assert metrics["steps_per_second"] == pytest.approx(1 / metrics["step_seconds"], rel=0.1)
    assert metrics["samples_per_second"] == pytest.approx(BATCH * metrics["steps_per_second"])
    assert metrics["tokens_per_second"] == pytest.approx(BATCH * WIDTH * metrics["steps_per_second"])
    assert sum(metrics[f"{phase}_seconds"] for phase in PHASES) == pytest.approx(metrics["step_seconds"])
    assert 0.02 < metrics["optimizer_seconds"] < metrics["step_seconds"]
    assert metrics["waiting_seconds"] == 0
    flops = 2 * BATCH * (WIDTH * WIDTH * (2 + 3) + WIDTH * 3)
    assert metrics["flops_per_second"] == pytest.approx(flops * metrics["steps_per_second"])
    assert 0 < metrics["mfu"] < 1
    assert 0 < metrics["host_memory_bytes"] <= metrics["host_memory_peak_bytes"]


def test_the_file_has_a_line_for_each_event_and_loggers_get_the_same_numbers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs")
    delay = Delay("saving", seconds=0.0)
    metrics = train(alone(loggers=logger), delay, tmp_path, 13, window_steps=5, show=False)
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["start", "peak", "save", "window", "save", "save", "window", "end"]
    assert lines[1]["peak_source"] == "measured by a matrix product"
    assert [line["step"] for line in lines if line["kind"] == "window"] == [7, 12]
    assert lines[-2]["metrics"] == metrics
    assert lines[-2]["ranks"][0]["loss"] == metrics["loss"]
    assert logger.file is not None
    rows = logger.file.read_text().splitlines()
    assert len(rows) == 3
    assert "monitor/step_seconds" in rows[0]


def test_a_file_of_a_killed_run_is_continued_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl").write_text('{"kind": "sta')
    with alone() as fabric:
        fabric.monitor(tmp_path, show=False)
    lines = (tmp_path / "monitor.jsonl").read_text().splitlines()
    assert lines[0] == '{"kind": "sta'
    assert json.loads(lines[1])["kind"] == "start"


def test_the_folder_of_a_monitor_has_the_settings_of_the_run(tmp_path: Path) -> None:
    with alone(precision="64-true") as fabric:
        fabric.monitor(tmp_path, show=False)
    settings = {each["name"]: each for each in json.loads((tmp_path / "run.json").read_text())["settings"]}
    assert (settings["precision"]["value"], settings["precision"]["source"]) == ("64-true", "argument")


def test_what_the_program_gives_is_shown_as_it_is(tmp_path: Path) -> None:
    with alone() as fabric:
        model = nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
        monitor = fabric.monitor(window_steps=2, show=False)
        for step in range(5):
            fabric.backward(model(torch.ones(3, 2)).sum())
            optimizer.step()
            monitor.add(samples=3, loss=7.0, gradient_norm=torch.tensor(float(step)))
    assert monitor.latest["loss"] == 7
    assert monitor.latest["gradient_norm"] == 2
    assert monitor.latest["samples_per_second"] > 0
    assert model._forward_pre_hooks == {}


def test_a_skipped_step_is_counted_and_written(tmp_path: Path) -> None:
    with alone() as fabric:
        model = nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
        fabric.guard_gradients("skip")
        monitor = fabric.monitor(tmp_path, window_steps=2, show=False)
        for step in range(5):
            fabric.backward(model(torch.ones(3, 2)).sum() * (torch.inf if step == 3 else 1))
            optimizer.step()
            optimizer.zero_grad()
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert monitor.latest["num_skipped_steps"] == 1
    assert [line["step"] for line in lines if line["kind"] == "skipped"] == [3]


def watched(fabric: Fabric, folder: str) -> None:
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
    fabric.monitor(folder, window_steps=20, show=False)
    for step in range(10):
        fabric.backward(model(torch.full((1, 2), float(step + fabric.global_rank))).sum())
        optimizer.step()
        optimizer.zero_grad()
    fabric.close()


@pytest.mark.slow
def test_the_steps_that_the_sanitizer_watched_are_in_the_file(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", launcher="forkserver")
    fabric.launch(watched, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "sanitizer"] == [1, 2, 3, 4, 8]
    assert lines[-1]["kind"] == "end"


def called(fabric: Fabric) -> Counter[str]:
    """The collectives of fifteen steps with a monitor that fifteen steps without one did not have."""
    model, recorder = nn.Linear(2, 1), FlightRecorder()
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
    counts = []
    for is_monitored in (False, False, True):  # in its first steps DDP has collectives of its own
        if is_monitored:
            fabric.monitor(window_steps=4, show=False)
        before = len(recorder.calls(with_lines=False))
        for _ in range(15):
            fabric.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        counts.append(Counter(call.operation.split()[0] for call in recorder.calls(with_lines=False)[before:]))
    assert not counts[1] - counts[2]
    return counts[2] - counts[1]


@pytest.mark.slow
def test_a_window_has_one_collective() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", sanitize=False, launcher="forkserver")
    (number,) = fabric.launch(called).values()
    assert number == 3, "windows end at the steps 6, 10 and 14"


@pytest.mark.slow
def test_tensorboard_has_the_numbers_of_each_window(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    metrics = train(alone(loggers=TensorBoardLogger(tmp_path)), Delay(), tmp_path / "run", 13, window_steps=5)
    (file,) = tmp_path.glob("version_0/events.*")
    found = [
        (event.step, value.tag, value.simple_value)
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert sorted({step for step, _, _ in found}) == [7, 12]
    last = {tag: value for step, tag, value in found if step == 12}
    assert last == {f"monitor/{name}": pytest.approx(value, rel=1e-6) for name, value in metrics.items()}


def fail_in_the_second_step() -> None:
    with alone() as fabric:
        model = nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
        fabric.monitor(show=False)
        for step in range(2):
            fabric.backward(model(torch.ones(3, 2)).sum() * (1 // (1 - step)))
            optimizer.step()


def test_an_exception_in_the_step_whose_flops_are_counted_ends_the_counting() -> None:
    with pytest.raises(ZeroDivisionError):
        fail_in_the_second_step()
    assert _get_current_dispatch_mode() is None


def leave(fabric: Fabric, folder: str, raises: bool) -> None:
    """Rank 1 does not close, or raises in the step after which the ranks bring together what they have measured."""
    closed, model = Path(folder) / "closed", nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
    fabric.monitor(window_steps=3, show=False)
    try:
        with fabric if raises else nullcontext():
            for step in range(1, 6):
                fabric.backward(model(torch.ones(3, 2)).sum())
                if raises and step == 5 and fabric.global_rank == 1:
                    raise ZeroDivisionError
                optimizer.step()
    except ZeroDivisionError:
        return
    if fabric.global_rank == 0:
        fabric.close()
        closed.touch()
    while not raises and not closed.exists():
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
def test_close_does_not_wait_for_a_rank_that_has_left_the_loop(raises: bool, tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", sanitize=False, launcher="forkserver")
    fabric.launch(leave, str(tmp_path), raises)


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with alone() as fabric:
        with pytest.raises(ValueError, match=r"`fabric.monitor\(window_steps=0\)`: a window has 1 step or more."):
            fabric.monitor(window_steps=0)
        with pytest.raises(OSError, match=r"writes `.*file/monitor.jsonl`, and cannot: .* Name a folder that can be"):
            fabric.monitor(tmp_path / "file")
        monitor = fabric.monitor()
        with pytest.raises(RuntimeError, match=r"`fabric.monitor\(\)` was called twice. Keep what the first call"):
            fabric.monitor()
        with pytest.raises(ValueError, match=r"`monitor.add\(tokens=-1\)`: write how many came since the last call"):
            monitor.add(tokens=-1)
        with pytest.raises(TypeError, match=r"`monitor.add\(tokens=...\)` was given a `Tensor`. Write a number"):
            monitor.add(tokens=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="needs the ranks, which do not exist yet"):
        Fabric(accelerator="cpu", devices=2).monitor()


METRICS = {
    "step_seconds": 0.0812,
    **{f"{phase}_seconds": 0.0116 for phase in PHASES},
    "steps_per_second": 12.3,
    "samples_per_second": 394.0,
    "tokens_per_second": 1.2e6,
    "flops_per_second": 3.2e14,
    "mfu": 0.412,
    "loss": 2.31,
    "gradient_norm": 0.87,
    "learning_rate": 3e-4,
    "device_memory_peak_bytes": 6.4e10,
}
SLOW = "Rank 2 is late in backward, by 50 ms of each step (31%); the others wait for it."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_never_wider_than_the_terminal(width: int) -> None:
    terminal = Terminal()
    console = Console(file=terminal, width=width, height=40, force_terminal=True, color_system=None)
    table = Table(console)
    table.show(1240, METRICS, [METRICS | {"rank": rank} for rank in range(12)], SLOW)
    console.print("what the program prints")
    table.close()
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(lines)
    assert "Rank 2 is late in backward" in shown
    assert "what the program prints" in shown
    for word in ("step 1,240", "12.3 steps/s", "394 samples/s", "1.2 M tokens/s", "MFU 41.2%", "64 GB", "81.2 ms"):
        assert word in shown
    assert "4 more ranks wait longer" in shown


def test_the_table_stands_beside_a_progress_bar_and_what_the_program_prints() -> None:
    terminal = Terminal()
    rich.reconfigure(file=terminal, width=120, height=40, force_terminal=True, color_system=None)
    try:
        with alone() as fabric:
            model = nn.Linear(2, 1)
            model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.5))
            loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1))
            fabric.monitor(window_steps=2)
            for (x,) in fabric.progress(loader, "training"):
                fabric.backward(model(x).sum())
                optimizer.step()
                rich.print("said by the program")
    finally:
        rich.reconfigure()
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.getvalue())
    assert shown.count("said by the program") == 8
    assert "step 6 " in shown
    assert "training" in shown
    assert "8/8" in shown


@pytest.mark.parametrize("is_dumb", [False, True])
def test_where_there_is_no_terminal_or_a_dumb_one_a_window_is_one_line(is_dumb: bool) -> None:
    file = Terminal() if is_dumb else io.StringIO()
    Table(Console(file=file, _environ={"TERM": "dumb"} if is_dumb else {})).show(
        7, METRICS, [METRICS | {"rank": 0}], SLOW
    )
    assert file.getvalue() == (
        "step 7, 12.3 steps/s, 394 samples/s, 1.2 M tokens/s, 320 TFLOP/s, MFU 41.2%, loss 2.31, norm 0.87, lr 0.0003"
        "; data 14%, forward 14%, backward 14%, optimizer 14%, waiting 14%, saving 14%, other 14%. "
        f"{SLOW}\n"
    )
