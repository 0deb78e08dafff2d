"""The rank for which the others wait is named with its phase and its delay, and nobody where nobody is late."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import BATCH, Delay, Rows, Slow, mover, train
from pipelining import NUM_WORDS, Net, cut_evenly, loss_of
from torch.optim import SGD
from torch.utils.data import DataLoader
from worlds import preload

from fabric import Fabric
from fabric.launchers.watch.table import Call
from fabric.monitor.results import Results
from fabric.monitor.slow_rank import SlowRanks, unknown_in_words
from fabric.monitor.window import (
    BACKWARD,
    NUM_LAST,
    PHASES,
    SAVING,
    STEP,
    Arrival,
    Gathered,
    Step,
    arrivals,
    pack,
    steps_of,
)
from fabric.strategies import ModelParallelStrategy, Pipeline

NUM_RANKS = 3


def run(strategy: str, delay: Delay, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The windows of a run."""
    preload("delays")
    devices = options.pop("devices", NUM_RANKS)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, sanitize=False, launcher="forkserver")
    fabric.launch(train, delay, folder, window_steps=6, show=False, **options)
    return [line for line in lines_of(folder) if line["kind"] == "window"]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]


WHERE = ["data", "forward", "optimizer", "saving"]


def check_named(windows: list[dict[str, Any]], delay: Delay) -> None:
    named = [window["slow"] for window in windows]
    found = {each and (each["rank"], each["phase"], each["is_passing"]) for each in named} - {None}
    assert found == {(1, delay.where, False)}
    seconds = named[-1]["seconds"] if named[-1] else named[-2]["seconds"]
    assert 0.3 * delay.seconds < seconds < 3 * delay.seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        *(("ddp", where) for where in WHERE),
        *(pytest.param("fsdp", where, marks=pytest.mark.thorough) for where in WHERE),
        *(
            pytest.param(strategy, where, marks=pytest.mark.thorough)
            for strategy in ("ddp_sharded", "deepspeed_stage_2")
            for where in (*WHERE[:3], "backward")
        ),
    ],
)
def test_the_late_rank_is_named_with_its_phase_and_its_delay(strategy: str, where: str, tmp_path: Path) -> None:
    delay = Delay(where, seconds=0.6 if where == "saving" else 0.12)
    check_named(run(strategy, delay, tmp_path, num_steps=20), delay)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_is_late_in_backward_is_named_though_all_backwards_are_equally_long(
    strategy: str, tmp_path: Path
) -> None:
    delay = Delay("backward", seconds=0.12)
    windows = run(strategy, delay, tmp_path, num_steps=20)
    check_named(windows, delay)
    ranks = windows[-1]["ranks"]
    whole = [each["backward_seconds"] + each["waiting_seconds"] for each in ranks]
    assert max(whole) < 1.5 * min(whole)
    assert 2 * ranks[1]["waiting_seconds"] < min(ranks[0]["waiting_seconds"], ranks[2]["waiting_seconds"])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_delay_that_moves_from_rank_to_rank_is_passing(tmp_path: Path) -> None:
    delay = Delay("forward", seconds=0.12, late=mover(2, NUM_RANKS))
    named = [window["slow"] for window in run("ddp", delay, tmp_path, num_steps=26)]
    assert {each and (each["phase"], each["is_passing"]) for each in named} - {None} == {("forward", True)}


class Words(Rows):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        super().__getitem__(index)
        return torch.full((3,), index % NUM_WORDS), torch.full((3,), index % 2)


def train_in_a_pipeline(fabric: Fabric, delay: Delay, folder: str) -> None:
    """Each rank has some blocks; `delay` is in the loader, in the first of them, in the step, or in each save."""
    torch.set_num_threads(1)
    delay.rank, net = fabric.global_rank, Net()
    for block in net.blocks.values():
        block.register_forward_hook(lambda *_: delay.at("forward"))
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.01))
    optimizer.register_step_pre_hook(lambda *_: delay.at("optimizer"))
    fabric.monitor(folder, window_steps=6, show=False)
    loader = fabric.setup_dataloaders(DataLoader(Words(14 * 2 * BATCH, delay), batch_size=BATCH))
    for delay.step, (tokens, targets) in enumerate(loader):
        fabric.backward(model(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        if delay.where == "saving" and delay.step % 4 == 3:
            fabric.save(f"{folder}/saved", {"slow": Slow(delay)})
    fabric.close()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("data", {(1, "data", False)}),
        ("forward", set()),
        ("optimizer", {(1, "optimizer", False)}),
        ("saving", {(1, "saving", False)}),
    ],
)
def test_in_a_pipeline_a_rank_is_named_for_what_is_outside_its_schedule(
    where: str, named: set[Any], tmp_path: Path
) -> None:
    preload("delays", "pipelining")
    stages = Pipeline(degree=2, num_microbatches=2, split=cut_evenly, loss_fn=loss_of)
    strategy = ModelParallelStrategy(pipeline=stages, data=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, sanitize=False, launcher="forkserver")
    fabric.launch(train_in_a_pipeline, Delay(where, seconds=0.6 if where == "saving" else 0.06), str(tmp_path))
    slow = [line["slow"] for line in lines_of(tmp_path) if line["kind"] == "window"]
    assert len(slow) == 2
    assert {(each["rank"], each["phase"], each["is_passing"]) for each in slow if each} == named


@pytest.mark.slow
@pytest.mark.thorough
def test_nobody_is_named_in_twenty_undisturbed_runs(tmp_path: Path) -> None:
    named = [
        window["slow"]
        for number in range(20)
        for window in run("ddp" if number % 2 else "fsdp", Delay(), tmp_path / str(number), devices=2, num_steps=20)
    ]
    assert len(named) == 60
    assert set(map(str, named)) == {"None"}


NOW = 1.8e9
"""Seconds of the system's clock."""


def rows(*arrivals: float, node: tuple[int, ...] = (0, 0), ahead: float = 0.0) -> Gathered:
    """Two ranks whose six steps of 100 ms have one collective each, 10 ms before the end of backward."""
    packed = []
    for rank, arrival in enumerate(arrivals):
        clock = NOW + ahead * node[rank]
        steps = [Step([0.02, 0.0, 0.08, 0.0, 0.0, 0.0, 0.0], 0.1 * number + clock) for number in range(1, 7)]
        found = [
            Arrival(float(number), 0.1 * (number - 1) + arrival + clock, 16 * (number - 1) + 2 * BACKWARD + 1)
            for number in range(1, 7)
        ]
        packed.append(pack({"node": node[rank], "num_steps": 6}, [*steps, Step()], found))
    return Gathered(torch.stack(packed))


WAITS = torch.tensor([[0.05] * 6, [0.0] * 6], dtype=torch.float64)


def test_a_rank_waits_from_its_arrival_to_that_of_the_last() -> None:
    gathered, ranks = rows(0.03, 0.08), SlowRanks()
    torch.testing.assert_close(gathered.waits()[:, NUM_LAST - 6 : NUM_LAST, BACKWARD], WAITS, atol=1e-6, rtol=0)
    found = [ranks.find(gathered.seconds_rsp - gathered.waits(), gathered.queued_rs, 0.09) for _ in range(2)][1]
    assert found is not None
    assert (found.rank, found.phase, round(found.seconds, 3)) == (1, "backward", 0.05)


def test_clocks_of_nodes_may_differ() -> None:
    waits = rows(0.03, 0.08, node=(0, 1), ahead=12.5).waits()[:, NUM_LAST - 6 : NUM_LAST, BACKWARD]
    torch.testing.assert_close(waits, WAITS, atol=1e-6, rtol=0)


def own(**more: float) -> torch.Tensor:
    """Own times of three ranks, of which rank 2 needs more in some phases."""
    times = torch.full((3, NUM_LAST + 1, len(PHASES)), 0.01, dtype=torch.float64)
    for phase, seconds in more.items():
        times[2, :, PHASES.index(phase)] += seconds
    return times


NOT_QUEUED = torch.zeros(3, NUM_LAST + 1, dtype=torch.float64)


def found_in(*windows: torch.Tensor, queued: torch.Tensor = NOT_QUEUED) -> list[tuple[int, str, bool] | None]:
    """Rank, phase and whether it is passing, for each of these windows of own times of steps of 100 ms."""
    ranks = SlowRanks()
    named = [ranks.find(window, queued, 0.1) for window in windows]
    return [each and (each.rank, each.phase, each.is_passing) for each in named]


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("waiting", "saving")])
def test_a_late_rank_is_named_once_it_is_seen_again(phase: str) -> None:
    late = own(**{phase: 0.02})
    assert found_in(late, late, own(), late, late) == [None, (2, phase, False), None, None, (2, phase, False)]


def test_another_phase_or_rank_than_in_the_window_before_is_not_named() -> None:
    assert found_in(own(data=0.2), own(backward=0.2), own(data=0.2), own(data=0.2).flip(0)) == [None] * 4


def test_who_waits_for_a_processor_is_not_called_slow() -> None:
    queued = NOT_QUEUED.clone()
    queued[2] = 0.05
    assert found_in(*[own(data=0.05)] * 2)[1] is not None
    assert found_in(*[own(data=0.05)] * 2, queued=queued)[1] is None
    assert found_in(*[own(data=0.05).flip(0)] * 2, queued=queued)[1] is None, "the machine is busy"


def test_on_a_busy_machine_the_table_and_the_file_say_who_may_stay_unnamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = dict.fromkeys(PHASES, 0.1)
    packed = [
        pack({**phases, "node": 0, "num_steps": 6, "seconds": 0.6}, [Step([0.1] * 7, queued=queued)] * 7, [])
        for queued in (0.0, 0.05)
    ]
    said = "Busy machine: ranks wait for processors. A rank late by less than 100 ms is not named."
    with Fabric(accelerator="cpu", devices=1) as fabric:
        Results(fabric._connected.runtime, "ddp", [], tmp_path, show=True).window(lambda: torch.stack(packed), 6, NOW)
    assert capsys.readouterr().out.endswith(f" {said}\n")
    assert [line["unknown"] for line in lines_of(tmp_path) if line["kind"] == "window"] == [said]
    assert unknown_in_words(own(), NOT_QUEUED, 0.1) == unknown_in_words(own()[:1], NOT_QUEUED[:1] + 0.05, 0.1) == ""


def test_where_torch_has_forgotten_collectives_the_monitor_says_that_no_rank_can_be_named() -> None:
    late = own(data=0.05)
    late[:, :-5] = torch.nan
    assert found_in(late, late) == [None, None]
    assert unknown_in_words(late, NOT_QUEUED, 0.1) == (
        "No late rank can be named: all collectives are known of 4 steps, and 5 are needed."
    )


@pytest.mark.parametrize(("num_calls", "known"), [(50, {0, 1, 2, 3, 4}), (60, {1, 2, 3, 4})])
def test_a_step_of_which_torch_has_forgotten_collectives_is_left_out(num_calls: int, known: set[int]) -> None:
    end, step_ns = int(NOW * 1e9), num_calls * 10**6
    ends = [end - step_ns * number for number in range(4, -1, -1)]
    steps = steps_of([mark for at in ends for mark in (BACKWARD, at, STEP, at)], end - 5 * step_ns)
    call = Call(group="a", number=1, operation="all_reduce", where="", started_ns=0)
    calls = [replace(call, number=number, started_ns=end - (256 - number) * 10**6) for number in range(256)]
    assert {each.place // 16 for each in arrivals(calls, steps)} == known


def test_nobody_is_named_where_waits_are_not_recorded_or_two_ranks_are_late() -> None:
    late = own(data=0.05)
    late[:2, :, BACKWARD] += 0.05  # the others wait in backward, under Horovod for example
    assert found_in(late, late) == [None, None]
    two = own(forward=0.05)
    two[0] = two[2]  # a stage and the next one, which waits for it in `recv`
    assert found_in(two, two) == [None, None]


def test_a_rank_that_is_late_in_half_of_the_steps_is_not_named() -> None:
    late = own(data=0.05)
    late[:, ::2] = 0.01
    assert found_in(late, late) == [None, None]


def test_nobody_is_named_where_own_times_differ_by_chance() -> None:
    torch.manual_seed(0)
    windows = [own() + 0.01 * torch.rand(3, NUM_LAST + 1, len(PHASES), dtype=torch.float64) for _ in range(200)]
    assert found_in(*windows) == [None] * 200


def test_a_delay_that_moves_in_a_window_or_between_windows_is_passing() -> None:
    moving, late = own(), own(forward=0.05)
    moving[torch.arange(NUM_LAST) // 2 % 3, torch.arange(NUM_LAST), PHASES.index("forward")] += 0.05
    assert found_in(moving, moving) == [None, (1, "forward", True)]
    assert found_in(late, late, late.flip(0), late.flip(0)) == [None, (2, "forward", False), None, (0, "forward", True)]


def test_a_slow_rank_is_told_in_one_sentence() -> None:
    ranks, saving = SlowRanks(), own()
    for late in (own(data=0.05).flip(0), own(data=0.05)):
        found = [ranks.find(late, NOT_QUEUED, 0.1) for _ in range(2)][1]
    assert found is not None
    assert found.in_words() == (
        "Rank 2 is late in data, by 50 ms of each step (50%); the others wait for it. The delay moves from rank to "
        "rank: it is passing."
    )
    saving[1, NUM_LAST, SAVING] = 0.3
    found = ranks.find(saving, NOT_QUEUED, 0.1)
    assert found is not None
    assert found.in_words() == "Rank 1 is late saving, by 290 ms of each save (97%); the others wait for it."
    saving[1, NUM_LAST, SAVING] = 0.1
    assert ranks.find(saving, NOT_QUEUED, 0.1) is None, "too little for a save"
