"""A rank fails: the right one is named, with its own words, and the others end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from worlds import run_world

from fabric.launchers import Topology, WorkerError, World, join
from fabric.launchers.failure import describe, first
from fabric.launchers.processes import forkserver
from fabric.launchers.report import Failure


def break_one_rank(world: World, how: str) -> Any:
    """Rank 1 breaks while the others are in a collective that needs it."""
    dist.init_process_group("gloo", store=join(world, 60, print), rank=world.rank, world_size=world.size)
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        break_down(how)
    dist.all_reduce(torch.ones(1))


def break_down(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("the learning rate is a fish")
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            sys.exit(0)
        case "leave with 3":
            sys.exit(3)
        case "unpicklable":
            raise UnpicklableError(lambda: None)
        case "cycle":
            try:
                raise ValueError("the chain of causes has no end") from (inner := KeyError("inner"))
            except ValueError as outer:
                raise inner from outer


class UnpicklableError(Exception):
    pass


def test_the_rank_that_raised_is_blamed_and_not_its_peers_ten_times_of_ten() -> None:
    for _ in range(10):
        with pytest.raises(WorkerError) as caught:
            run_world(3, break_one_rank, "raise")
        assert caught.value.rank == 1
        assert isinstance(caught.value.cause, ValueError)
        assert caught.value.__cause__ is caught.value.cause
        assert "rank 1 of 3 failed first: ValueError: the learning rate is a fish" in str(caught.value)


def test_the_message_ends_with_the_users_own_frames() -> None:
    with pytest.raises(WorkerError) as caught:
        run_world(2, break_one_rank, "raise")
    lines = str(caught.value).splitlines()
    assert lines[-1] == "ValueError: the learning rate is a fish"
    assert str(caught.value).count("Traceback (most recent call last)") == 1
    assert not re.search(r"launchers/(rank|order|fork_server)\.py", str(caught.value))
    assert "in break_down" in str(caught.value)


def test_a_segfault_is_named_and_shows_the_users_line() -> None:
    with pytest.raises(
        WorkerError, match=r"rank 1 of 2 failed first: killed by SIGSEGV \(segmentation fault\)"
    ) as caught:
        run_world(2, break_one_rank, "segfault")
    assert (caught.value.rank, caught.value.signal, caught.value.exit_code) == (1, signal.SIGSEGV, None)
    assert "in break_down" in str(caught.value)


def test_a_rank_killed_from_outside_is_named_with_what_may_have_done_it() -> None:
    with pytest.raises(
        WorkerError, match=r"killed by SIGKILL \(somebody's `kill -9`, or the kernel when memory ran out\)"
    ):
        run_world(2, break_one_rank, "kill")


@pytest.mark.parametrize(("how", "code"), [("leave", 0), ("leave with 3", 3)])
def test_a_rank_that_leaves_without_a_result_is_a_failure_with_its_exit_code(how: str, code: int) -> None:
    with pytest.raises(WorkerError, match=f"left with exit code {code} before its function returned") as caught:
        run_world(2, break_one_rank, how)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def test_an_exception_that_cannot_travel_comes_home_as_words() -> None:
    with pytest.raises(WorkerError, match="UnpicklableError") as caught:
        run_world(2, break_one_rank, "unpicklable")
    assert caught.value.cause is None


def leave_on_rank_zero(world: World) -> None:
    if world.rank == 0:
        sys.exit(0)


def test_a_chain_of_causes_that_is_a_ring_comes_home() -> None:
    with pytest.raises(WorkerError, match="the chain of causes has no end") as caught:
        run_world(2, break_one_rank, "cycle")
    assert isinstance(caught.value.cause, KeyError)


def test_rank_zero_that_leaves_does_not_hang_the_launch() -> None:
    with pytest.raises(
        WorkerError, match="rank 0 of 2 failed first: left with exit code 0 before its function returned"
    ):
        forkserver(Topology(num_processes=2)).launch(leave_on_rank_zero)


def give_a_function(world: World) -> Any:
    return lambda: None


def test_a_result_that_cannot_travel_is_an_error_that_names_rank_and_type() -> None:
    with pytest.raises(WorkerError, match="Rank 0 returned a `function`, which cannot be pickled"):
        forkserver(Topology(num_processes=2)).launch(give_a_function)


def test_a_function_that_cannot_travel_is_an_error_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"`launcher='forkserver'` sends .* Define them at the top level of a module"):
        forkserver(Topology(num_processes=2)).launch(lambda world: None)


def give(world: World, kind: str) -> Any:
    match kind:
        case "200 KB":
            return b"x" * 200_000
        case "50 MB":
            return torch.arange(12_500_000, dtype=torch.float32)
        case "state dict":
            torch.manual_seed(0)
            return torch.nn.Linear(300, 300).state_dict()
        case "nothing":
            return None


@pytest.mark.parametrize("kind", ["200 KB", "50 MB", "state dict", "nothing"])
def test_results_of_any_size_come_home(kind: str) -> None:
    result = forkserver(Topology(num_processes=2)).launch(give, kind)
    expected = give(World(), kind)
    if isinstance(expected, dict):
        assert list(result) == list(expected)
        assert all(torch.equal(result[name], expected[name]) for name in expected)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(result, expected)
    else:
        assert result == expected


def take(world: World, tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def test_arguments_of_any_size_reach_the_ranks() -> None:
    assert run_world(2, take, torch.ones(2_000_000)) == [2_000_000.0] * 2


def failure_of(rank: int, at_ms: float, *, lost_peer: bool = False) -> Failure:
    summary = "RuntimeError: Connection closed by peer" if lost_peer else f"ValueError: {rank}"
    return Failure(rank=rank, at_ns=int(at_ms * 1e6), summary=summary, lost_peer=lost_peer, traceback=f"trace {rank}")


def test_a_symptom_is_never_to_blame_while_there_is_a_cause() -> None:
    failures = [failure_of(0, 1, lost_peer=True), failure_of(2, 5), failure_of(1, 3)]
    assert first(failures).rank == 1


def test_other_ranks_get_one_line_each_and_the_blamed_one_comes_last() -> None:
    failures = [failure_of(0, 7, lost_peer=True), failure_of(1, 3)]
    assert describe(failures, 2) == (
        "rank 0 of 2, 4 ms later: RuntimeError: Connection closed by peer\n"
        "rank 1 of 2 failed first: ValueError: 1\n\ntrace 1"
    )


def test_a_peer_that_left_in_peace_is_mentioned() -> None:
    text = describe([failure_of(0, 7, lost_peer=True)], 2, ended=[1])
    assert text.startswith("rank 1 of 2: left with exit code 0 while others still waited for it\n")


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from fabric.launchers import Topology, choose_launcher, detect_world, join
word, how = sys.argv[1:]
world = choose_launcher(word, Topology(num_processes=2), function=None, world=detect_world(os.environ)).enter()
dist.init_process_group("gloo", store=join(world, 60, print), rank=world.rank, world_size=world.size)
dist.all_reduce(torch.ones(1))

def users_function():
    raise ValueError("the learning rate is a fish")

if world.rank == 1:
    if how == "raise":
        users_function()
    if how == "kill":
        os.kill(os.getpid(), 9)
    sys.exit(int(how))
if how != "0":
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["fork", "script"])
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "rank 1 of 2 failed first: ValueError: the learning rate is a fish"),
        ("kill", 137, "rank 1 of 2 failed first: killed by SIGKILL"),
        ("0", 0, ""),
    ],
)
def test_a_script_ends_with_the_first_failures_exit_code(
    tmp_path: Path, word: str, how: str, code: int, words: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run([tmp_path / "script.py", word, how])
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    if how == "raise":
        assert done.stderr.rstrip().endswith("ValueError: the learning rate is a fish")
        assert done.stderr.count("Traceback") == 1
        assert "launchers/" not in done.stderr


@pytest.mark.slow
def test_the_exit_code_of_a_rank_is_that_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run([tmp_path / "script.py", "script", "3"])
    assert done.returncode == 3, done.stderr
    assert "rank 1 of 2 failed first: left with exit code 3" in done.stderr
