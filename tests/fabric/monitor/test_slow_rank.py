"""The rank for which the others wait is named with its phase and its delay, and nobody where nobody is late."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import Delay, mover, train
from worlds import preload

from fabric import Fabric
from fabric.monitor.slow_rank import SlowRanks
from fabric.monitor.window import BACKWARD, NUM_LAST, PHASES, SAVING, Arrival, Gathered, Step, pack

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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "forward", "backward", "optimizer", "saving"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_late_rank_is_named_with_its_phase_and_its_delay(strategy: str, where: str, tmp_path: Path) -> None:
    delay = Delay(where, seconds=0.2 if where == "saving" else 0.06)
    named = [window["slow"] for window in run(strategy, delay, tmp_path)]
    assert [each and (each["rank"], each["phase"], each["is_passing"]) for each in named] == [(1, where, False)] * 2
    assert all(0.6 * delay.seconds < each["seconds"] < 1.6 * delay.seconds for each in named), named


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_backwards_are_equally_long_where_one_rank_is_late_in_it(strategy: str, tmp_path: Path) -> None:
    windows = run(strategy, Delay("backward", seconds=0.06), tmp_path)
    ranks = windows[-1]["ranks"]
    whole = [each["backward_seconds"] + each["waiting_seconds"] for each in ranks]
    assert max(whole) - min(whole) < 0.03, "so phases alone do not show it"
    assert ranks[1]["waiting_seconds"] < 0.03 < min(ranks[0]["waiting_seconds"], ranks[2]["waiting_seconds"])


@pytest.mark.slow
def test_a_delay_that_moves_from_rank_to_rank_is_passing(tmp_path: Path) -> None:
    delay = Delay("forward", seconds=0.06, late=mover(2, NUM_RANKS))
    named = [window["slow"] for window in run("ddp", delay, tmp_path, num_steps=26)]
    assert [each and (each["phase"], each["is_passing"]) for each in named] == [("forward", True)] * 4


@pytest.mark.slow
def test_nobody_is_named_in_twenty_undisturbed_runs(tmp_path: Path) -> None:
    named = [
        window["slow"]
        for number in range(20)
        for window in run("ddp" if number % 2 else "fsdp", Delay(), tmp_path / str(number), devices=2, num_steps=20)
    ]
    assert len(named) == 60
    assert set(map(str, named)) == {"None"}


def rows(*arrivals: float, node: tuple[int, ...] = (0, 0), ahead: float = 0.0) -> Gathered:
    """Two ranks whose six steps of 100 ms have one collective each, 10 ms before the end of backward."""
    packed = []
    for rank, arrival in enumerate(arrivals):
        clock = ahead * node[rank]
        steps = [Step([0.02, 0.0, 0.08, 0.0, 0.0, 0.0, 0.0], 0.1 * number + clock) for number in range(1, 7)]
        found = [
            Arrival(float(number), 0.1 * (number - 1) + arrival + clock, 16 * (number - 1) + 2 * BACKWARD + 1)
            for number in range(1, 7)
        ]
        packed.append(pack({"node": node[rank], "num_steps": 6}, [*steps, Step()], found, 8))
    return Gathered(torch.stack(packed))


def test_a_rank_waits_from_its_arrival_to_that_of_the_last() -> None:
    gathered = rows(0.03, 0.08)
    waits = gathered.waits()[:, NUM_LAST - 6 : NUM_LAST, BACKWARD]
    torch.testing.assert_close(waits, torch.tensor([[0.05] * 6, [0.0] * 6], dtype=torch.float64))
    found = SlowRanks().find(gathered.seconds_rsp - gathered.waits(), gathered.queued_rs, 0.09)
    assert found is not None
    assert (found.rank, found.phase, round(found.seconds, 3)) == (1, "backward", 0.05)


def test_clocks_of_nodes_may_differ() -> None:
    gathered = rows(0.03, 0.08, node=(0, 1), ahead=12.5)
    waits = gathered.waits()[:, NUM_LAST - 6 : NUM_LAST, BACKWARD]
    torch.testing.assert_close(waits, torch.tensor([[0.05] * 6, [0.0] * 6], dtype=torch.float64), atol=1e-6, rtol=0)


def own(**more: float) -> torch.Tensor:
    """Own times of three ranks, of which rank 2 needs more in some phases."""
    times = torch.full((3, NUM_LAST + 1, len(PHASES)), 0.01, dtype=torch.float64)
    for phase, seconds in more.items():
        times[2, :, PHASES.index(phase)] += seconds
    return times


NOT_QUEUED = torch.zeros(3, NUM_LAST + 1, dtype=torch.float64)


def test_who_waits_for_a_processor_is_not_called_slow() -> None:
    queued = NOT_QUEUED.clone()
    queued[2] = 0.05
    assert SlowRanks().find(own(data=0.05), NOT_QUEUED, 0.1) is not None
    assert SlowRanks().find(own(data=0.05), queued, 0.1) is None


def test_a_small_delay_is_named_once_it_is_seen_again() -> None:
    ranks = SlowRanks()
    assert ranks.find(own(data=0.02), NOT_QUEUED, 0.1) is None
    found = ranks.find(own(data=0.02), NOT_QUEUED, 0.1)
    assert found is not None
    assert (found.rank, found.phase, found.is_passing) == (2, "data", False)
    assert ranks.find(own(backward=0.02), NOT_QUEUED, 0.1) is None


def test_a_slow_rank_is_told_in_one_sentence() -> None:
    ranks, saving = SlowRanks(), own()
    ranks.find(own(data=0.05).flip(0), NOT_QUEUED, 0.1)
    found = ranks.find(own(data=0.05), NOT_QUEUED, 0.1)
    assert found is not None
    assert found.in_words() == (
        "Rank 2 is late in data, by 50 ms of each step (50%); the others wait for it. The delay moves from rank to "
        "rank: it is passing."
    )
    saving[1, NUM_LAST, SAVING] = 0.3
    found = ranks.find(saving, NOT_QUEUED, 0.1)
    assert found is not None
    assert found.in_words() == "Rank 1 is late saving, by 290 ms of each save (97%); the others wait for it."
