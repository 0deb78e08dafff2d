"""`fabric.trace`: one file with rows for each rank, on one clock, and how much of its collectives is exposed."""

import gzip
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import preload

from fabric import Fabric
from fabric.report.trace import Trace, ahead_us, covered, in_rows, summary

DELAY = 0.3


def train(fabric: Fabric, folder: str, steps: range, until: int) -> int:
    """Steps, of which rank 1 begins the second traced one late. Returns how many checks are left."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    before = len(fabric._connected.moments.checks)
    fabric.trace(steps, folder)
    for number in range(1, until + 1):
        if number == steps.start + 1 and fabric.global_rank == 1:
            time.sleep(DELAY)
        with torch.profiler.record_function(f"step {number}"):
            fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return len(fabric._connected.moments.checks) - before


def events_of(file: Path) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert set(trace) == {"baseTimeNanoseconds", "displayTimeUnit", "traceEvents"}
    return trace["traceEvents"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_two_ranks_are_in_one_file_on_one_clock_and_the_wait_for_the_late_one_is_exposed(tmp_path: Path) -> None:
    preload("torch.profiler")
    begun_ns = time.time_ns()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", sanitize=False)
    assert fabric.launch(train, str(tmp_path / "run"), range(3, 5), 6) == 0  # a trace that is written costs nothing
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["trace-3-4.json.gz", "trace-3-4.summary.json"]
    file = tmp_path / "run/trace-3-4.json.gz"
    events = events_of(file)
    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.partition(" (")[0] for name in rows.values()] == ["rank 0: CPU", "rank 1: CPU"]
    assert {event["pid"] for event in events} == {0, 1000}
    steps = {
        (event["pid"] // 1000, event["name"]): event["ts"] for event in events if event["name"].startswith("step ")
    }
    assert set(steps) == {(rank, f"step {number}") for rank in (0, 1) for number in (3, 4)}
    late = (steps[1, "step 4"] - steps[0, "step 4"]) / 1e6
    assert 0.5 * DELAY < late < DELAY + 1
    base_ns = json.loads(gzip.decompress(file.read_bytes()))["baseTimeNanoseconds"]
    assert begun_ns < base_ns + 1000 * min(steps.values()) < time.time_ns()
    summaries = json.loads((tmp_path / "run/trace-3-4.summary.json").read_text())
    assert (summaries["steps"], summaries["file"]) == ([3, 4], "trace-3-4.json.gz")
    zero, one = summaries["ranks"]
    assert zero["exposed_seconds"] > 0.5 * DELAY > one["exposed_seconds"]  # rank 0 waits for rank 1
    for rank in (zero, one):
        assert rank["num_collectives"] >= 2
        total = rank["overlapped_seconds"] + rank["exposed_seconds"]
        assert total == pytest.approx(rank["collective_seconds"])
        assert 0 < rank["compute_seconds"] <= rank["seconds"]


def overlap(fabric: Fabric, folder: str, asynchronously: bool) -> None:
    """One all-reduce of which rank 1 is late; rank 0 computes meanwhile, or after it."""
    model = torch.nn.Linear(1, 1)
    _, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    fabric.trace(range(1, 2), folder)
    start = fabric.collective.start_all_reduce if asynchronously else fabric.collective.all_reduce
    if fabric.global_rank == 1:
        time.sleep(DELAY)
    wait = start(torch.ones(4))
    ends = time.monotonic() + DELAY
    while fabric.global_rank == 0 and time.monotonic() < ends:
        torch.ones(200, 200) @ torch.ones(200, 200)
    if callable(wait):
        wait()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronously", [True, False], ids=["overlapped", "exposed"])
def test_a_collective_beside_computation_is_overlapped(tmp_path: Path, asynchronously: bool) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", sanitize=False)
    fabric.launch(overlap, str(tmp_path), asynchronously)
    (rank, _) = json.loads((tmp_path / "trace-1-1.summary.json").read_text())["ranks"]
    name = "overlapped_seconds" if asynchronously else "exposed_seconds"
    assert rank[name] > 0.6 * DELAY
    assert rank[name] > 0.6 * rank["collective_seconds"]


def test_a_loop_that_ends_before_is_traced_as_far_as_it_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fabric"):
        with Fabric(accelerator="cpu", sanitize=False) as fabric:
            assert train(fabric, str(tmp_path), range(2, 9), 3) == 1
        assert (tmp_path / "trace-2-3.json.gz").exists()
        with Fabric(accelerator="cpu", sanitize=False) as fabric:
            train(fabric, str(tmp_path / "none"), range(5, 9), 3)
    assert not (tmp_path / "none").exists()
    first, second = caplog.messages
    assert first == f"Trace of steps 2 to 3: {tmp_path / 'trace-2-3.json.gz'}. Open it at https://ui.perfetto.dev"
    assert second == "No trace: the loop ended after 3 steps, before range(5, 9)."


def test_an_exception_in_the_loop_stops_the_profiler(tmp_path: Path) -> None:
    def fail() -> None:
        with Fabric(accelerator="cpu") as fabric:
            train(fabric, str(tmp_path), range(2, 9), 3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with Fabric(accelerator="cpu") as fabric:  # a profiler that runs would refuse another one
        train(fabric, str(tmp_path), range(1, 2), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-1-1.json.gz", "trace-1-1.summary.json"]


@pytest.mark.parametrize("steps", [range(2), range(3, 3), range(1, 9, 2), [1, 2], 3])
def test_steps_that_are_no_range_from_1_on_are_refused(steps: Any) -> None:
    with Fabric(accelerator="cpu") as fabric, pytest.raises(ValueError, match="name steps as `range") as raised:
        fabric.trace(steps)
    assert str(raised.value) == f"`fabric.trace(steps={steps!r})`: name steps as `range(10, 12)` does, from 1 on."


def test_steps_that_were_made_are_refused(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu") as fabric:
        train(fabric, str(tmp_path), range(1, 2), 3)
        with pytest.raises(ValueError, match="Name later ones") as raised:
            fabric.trace(range(3, 5))
    assert str(raised.value) == "`fabric.trace(steps=range(3, 5))`: 3 steps were made. Name later ones."


def test_a_trace_is_a_check_whose_only_call_in_other_steps_is_that_after_a_step() -> None:
    overridden = {name for name in vars(Trace) if not name.startswith("_")}
    assert overridden == {"after_step", "closing", "removed"}


def span(name: str, begin: float, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "cpu_op", "ts": begin * 1e6, "dur": seconds * 1e6, "pid": 7, **fields}


def test_the_summary_of_operators_and_gloo() -> None:
    events = [
        span("aten::linear", 0, 4),
        span("aten::addmm", 1, 2),  # within it
        span("gloo:all_reduce", 3, 4, cat="user_annotation"),  # 1 s beside `linear`, 3 s alone
        span("c10d::allreduce_", 3, 4),  # issues it
        span("AddmmBackward0", 4, 6),  # a range
        span("aten::add_", 8, 1),
        span("gloo:broadcast", 8, 1, cat="user_annotation"),
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
    ]
    expected = {"seconds": 10, "compute_seconds": 5, "collective_seconds": 5, "overlapped_seconds": 2}
    assert summary(events) == pytest.approx({**expected, "exposed_seconds": 3, "num_collectives": 2})


def test_the_summary_of_kernels_counts_no_operators() -> None:
    events = [
        span("aten::mm", 0, 9),
        span("ampere_sgemm", 1, 2, cat="kernel", pid=0),
        span("ncclDevKernel_AllReduce_Sum_f32", 2, 3, cat="kernel", pid=0),
        span("nccl:all_reduce", 0, 9, cat="user_annotation"),
    ]
    expected = {"seconds": 9, "compute_seconds": 2, "collective_seconds": 3, "overlapped_seconds": 1}
    assert summary(events) == pytest.approx({**expected, "exposed_seconds": 2, "num_collectives": 1})


def test_the_summary_of_no_events_is_zeros() -> None:
    assert set(summary([]).values()) == {0}


def test_intervals_that_overlap_are_counted_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert covered([]) == 0


def test_clocks_of_other_hosts_are_compared_and_those_of_one_host_are_one() -> None:
    readings = [("a", (0, 1000, 2000)), ("a", (500, 900, 2700)), ("b", (5000, 6000, 99000)), ("b", (5000, 6000, 7000))]
    assert ahead_us(readings) == [0, 0, 5, 5]


def test_rows_of_a_rank_are_its_own_and_flows_do_not_cross_ranks() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 40, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 40, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "args": {"labels": "GPU 1"}},
        {"ph": "M", "name": "thread_name", "pid": 40, "tid": 4, "ts": 0, "args": {"name": "thread 4"}},
        {"ph": "X", "name": "aten::mm", "pid": 40, "tid": 4, "ts": 10, "dur": 1},
        {"ph": "s", "name": "ac2g", "id": 5, "pid": 40, "tid": 4, "ts": 10},
        {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 11, "dur": 1},
    ]
    rows = list(in_rows(events, 3, "a", -2.0))
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {3000: "rank 3: CPU (a)", 3001: "rank 3: GPU 0 (a)"}  # GPU 1 did nothing
    assert [(row["name"], row["pid"], row["ts"]) for row in rows if row["ph"] == "X"] == [
        ("aten::mm", 3000, 8),
        ("gemm", 3001, 9),
    ]
    assert [row["id"] for row in rows if "id" in row] == ["3/5"]
    assert [row["args"]["name"] for row in rows if row["name"] == "thread_name"] == ["thread 4"]
