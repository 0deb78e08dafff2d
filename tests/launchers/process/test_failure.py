"""A rank fails: the right one is named, with its own words, and the others end."""

from __future__ import annotations

import ctypes
import linecache
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from worlds import run_world

from fabric.launchers import Topology, WorkerError, World, join
from fabric.launchers.process.failure import departure, describe, first
from fabric.launchers.process.reports import Failure
from fabric.launchers.start_methods import forkserver


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
            raise UnpicklableError(threading.Lock())
        case "not an exception" | "exits when read" | "exits when written" | "no words":
            raise HostileError(how)
        case "cycle":
            try:
                raise ValueError("the chain of causes has no end") from (inner := KeyError("inner"))
            except ValueError as outer:
                raise inner from outer


class UnpicklableError(Exception):
    pass


class HostileError(RuntimeError):
    def __reduce__(self) -> tuple[Any, ...]:
        match self.args[0]:
            case "not an exception":
                return int, (5,)
            case "exits when read":
                return sys.exit, (7,)
            case "exits when written":
                raise SystemExit(9)
        return type(self), self.args

    def __str__(self) -> str:
        return self.args[0] if self.args[0] != "no words" else self.args[1]  # an IndexError


def test_the_rank_that_raised_is_named_as_the_cause_ten_times_of_ten() -> None:
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


def test_a_segfault_is_named_and_the_users_line_is_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 1 of 2 failed first: killed by SIGSEGV \(segmentation fault"
    ) as caught:
        run_world(2, break_one_rank, "segfault")
    assert (caught.value.rank, caught.value.signal, caught.value.exit_code) == (1, signal.SIGSEGV, None)
    assert "in break_down" in capfd.readouterr().err


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


def test_an_exception_that_cannot_be_pickled_is_reported_as_text() -> None:
    with pytest.raises(WorkerError, match="UnpicklableError") as caught:
        run_world(2, break_one_rank, "unpicklable")
    assert caught.value.cause is None


@pytest.mark.parametrize("how", ["not an exception", "exits when read", "exits when written", "no words"])
def test_an_exception_whose_own_methods_fail_is_reported(how: str) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 2 failed first: .*HostileError") as caught:
        run_world(2, break_one_rank, how)
    assert (caught.value.cause is None) == (how != "no words")


WORDS = "DataLoader timed out after 5 seconds: Broken pipe, Connection closed by peer, gloo"


def raise_words(world: World, kind: type[Exception]) -> None:
    dist.init_process_group("gloo", store=join(world, 60, print), rank=world.rank, world_size=world.size)
    if world.rank == 1:
        raise kind(WORDS)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("kind", [RuntimeError, BrokenPipeError, TimeoutError])
def test_a_rank_that_fails_with_the_words_of_a_lost_peer_is_named(kind: type[Exception]) -> None:
    with pytest.raises(WorkerError, match=f"rank 1 of 2 failed first: {kind.__name__}: {WORDS}"):
        run_world(2, raise_words, kind)


def test_a_traceback_shows_the_lines_of_a_notebook_s_cell() -> None:
    name, source, names = "/tmp/ipykernel_1/2.py", "def train(world):\n    raise ValueError('a fish')\n", {}
    exec(compile(source, name, "exec"), names)
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # as IPython does
    with pytest.raises(WorkerError) as caught:
        forkserver(Topology(num_processes=2)).launch(names["train"])
    del linecache.cache[name]
    assert f"File \"{name}\", line 2, in train\n    raise ValueError('a fish')\n" in str(caught.value)


def leave_on_rank_zero(world: World) -> None:
    if world.rank == 0:
        sys.exit(0)


def test_a_circular_chain_of_causes_is_reported() -> None:
    with pytest.raises(WorkerError, match="the chain of causes has no end") as caught:
        run_world(2, break_one_rank, "cycle")
    assert isinstance(caught.value.cause, KeyError)


def test_rank_zero_that_leaves_does_not_hang_the_launch() -> None:
    with pytest.raises(
        WorkerError, match="rank 0 of 2 failed first: left with exit code 0 before its function returned"
    ):
        forkserver(Topology(num_processes=2)).launch(leave_on_rank_zero)


def give_a_lock(world: World) -> Any:
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_an_error_that_names_rank_and_type() -> None:
    with pytest.raises(WorkerError, match="Rank 0 returned a `lock`, which cannot be pickled"):
        forkserver(Topology(num_processes=2)).launch(give_a_lock)


def test_an_argument_that_cannot_be_pickled_is_an_error_before_anything_starts() -> None:
    with pytest.raises(
        TypeError, match=r"`launcher='forkserver'` sends .* by `cloudpickle` either: .* `launcher='fork'`"
    ):
        forkserver(Topology(num_processes=2)).launch(give, threading.Lock())


def give_a_closure(world: World, scale: Callable[[int], int]) -> Callable[[], int]:
    return lambda: scale(world.size)


def test_lambdas_and_closures_can_be_launched_and_returned() -> None:
    factor = 21
    result = forkserver(Topology(num_processes=2)).launch(give_a_closure, lambda size: factor * size)
    assert result() == 42


def test_an_instance_of_a_local_class_can_be_returned() -> None:
    class Local:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    result = forkserver(Topology(num_processes=2)).launch(lambda world: Local(world.rank))
    assert isinstance(result, Local)
    assert result.rank == 0


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
def test_results_of_any_size_are_returned(kind: str) -> None:
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


def failure_of(rank: int, at_ms: float, *, lost_peer: bool = False, trace: str = "") -> Failure:
    summary = "RuntimeError: Connection closed by peer" if lost_peer else f"ValueError: {rank}"
    trace = trace or f"trace {rank}"
    return Failure(rank=rank, at_ns=int(at_ms * 1e6), summary=summary, lost_peer=lost_peer, traceback=trace)


def test_a_lost_peer_is_never_named_as_the_cause_if_another_rank_failed() -> None:
    failures = [failure_of(0, 1, lost_peer=True), failure_of(2, 5), failure_of(1, 3)]
    assert first(failures).rank == 1


def test_other_ranks_get_one_line_each_and_the_cause_comes_last() -> None:
    failures = [failure_of(0, 7, lost_peer=True), failure_of(1, 3)]
    assert describe(failures, 2) == (
        "rank 0 of 2, 4 ms later: RuntimeError: Connection closed by peer\n"
        "rank 1 of 2 failed first: ValueError: 1\n\ntrace 1"
    )


def left(rank: int, at_ms: float) -> Failure:
    return departure(rank, int(at_ms * 1e6), "left with exit code 0")


def test_a_rank_that_left_is_the_cause_if_a_collective_lost_its_peer() -> None:
    noticed = failure_of(0, 7, lost_peer=True, trace="its place: [gloo/transport/tcp/pair.cc:553] closed")
    noticed = replace(noticed, where="at fabric.backward, train.py:9 in main, after 6 steps")
    assert describe([noticed], 2, [left(1, 3)]) == (
        "rank 0 of 2, 4 ms later, at fabric.backward, train.py:9 in main, after 6 steps: RuntimeError: Connection "
        "closed by peer\n"
        "rank 1 of 2 failed first: left with exit code 0 while other ranks still communicated with it"
    )
    assert first([noticed], [left(2, -60_000), left(1, 8), left(3, 12)]).rank == 1


def test_a_rank_that_left_is_not_the_cause_of_another_error() -> None:
    assert first([failure_of(0, 7)], [left(1, 3)]).rank == 0


def lose_another_connection(world: World) -> None:
    if world.rank == 1:
        raise ConnectionRefusedError("Connection refused: an upload")


def test_a_rank_that_loses_the_connection_to_another_service_is_named() -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2 failed first: ConnectionRefusedError") as caught:
        run_world(2, lose_another_connection)
    assert caught.value.rank == 1


LEFT = """
import os, sys
import torch
from torch.utils.data import DataLoader
from fabric import Fabric, WorkerError

def work(fabric, how):
    loader = DataLoader(list(range(1000)), num_workers=1)  # its worker must not keep the report of a rank open
    for step, batch in enumerate(loader):
        fabric.all_reduce(torch.ones(1))
        if step == 3 and fabric.global_rank == 1:
            if how == "exit":
                sys.exit(0)
            if how == "at once":
                os._exit(0)
            return

def main():
    word, way, how = sys.argv[1:]
    fabric = Fabric(accelerator="cpu", devices=2, launcher=word)
    if way == "function":
        fabric.launch(work, how)
    else:
        fabric.launch()
        work(fabric, how)

if __name__ == "__main__":
    main()
"""


ENDED = "(left with exit code 0|came to its end)"
"""The peer may notice that a rank ends before the rank has an exit code."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "way", "how", "words"),
    [
        ("fork", "line", "exit", f"{ENDED} while other ranks still communicated with it"),
        ("fork", "line", "at once", f"{ENDED} while other ranks still communicated with it"),
        ("script", "line", "return", f"{ENDED} while other ranks still communicated with it"),
        ("forkserver", "function", "return", "its function returned while other ranks still communicated with it"),
        ("forkserver", "function", "at once", "left with exit code 0 before its function returned"),
    ],
)
def test_a_rank_that_leaves_with_code_0_in_mid_training_is_named(
    tmp_path: Path, word: str, way: str, how: str, words: str
) -> None:
    (tmp_path / "script.py").write_text(LEFT)
    done = run([tmp_path / "script.py", word, way, how])
    assert done.returncode == 1, done.stderr
    assert re.search(f"rank 1 of 2 failed first: {words}", done.stderr), done.stderr
    if "communicated" in words:  # otherwise its end alone is a failure, and may be known before the peer notices it
        assert re.search(
            r"rank 0 of 2, \d+ ms (later|earlier), at .*script.py:\d+ in \w+: .*CollectiveError", done.stderr
        )


EXITS = """
import sys
import torch
from fabric import Fabric

def train(fabric):
    model = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(9):
        if step == 4 and fabric.global_rank == 1:
            sys.exit(int(sys.argv[3]))
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

word, strategy = sys.argv[1:3]
fabric = Fabric(accelerator="cpu", devices=2, launcher=word, strategy=strategy, sanitize="always")
fabric.launch()
train(fabric)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "strategy", "code"),
    [("fork", "ddp", 3), ("script", "fsdp", 3), ("fork", "deepspeed_stage_2", 3), ("fork", "ddp", 0)],
)
def test_the_exit_code_of_a_rank_that_leaves_in_mid_training_stands_where_the_sanitizer_compares(
    tmp_path: Path, word: str, strategy: str, code: int
) -> None:
    (tmp_path / "script.py").write_text(EXITS)
    done = run([tmp_path / "script.py", word, strategy, str(code)])
    assert done.returncode == (code or 1), done.stderr
    assert re.search(rf"rank 1 of 2 failed first: (left with exit code {code}|came to its end)", done.stderr), (
        done.stderr
    )


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from fabric.launchers import Topology, detect_world, join
from fabric.launchers.choose import choose_launcher
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
@pytest.mark.parametrize("word", ["fork", pytest.param("script", marks=pytest.mark.thorough)])
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


WORKERS = """
import multiprocessing, os, signal, sys
import torch
from torch.utils.data import DataLoader
from fabric import Fabric

def work(fabric, how):
    loaders = [iter(DataLoader(list(range(1000)), num_workers=2)) for _ in range(3)]
    for loader in loaders:
        next(loader)
    fabric.barrier()
    if fabric.global_rank == 1:
        workers = multiprocessing.active_children()
        if how == "abort":
            for worker in workers:
                os.kill(worker.pid, signal.SIGABRT)
            # DataLoader's handler raises here. A batch of a worker that is dying raises ConnectionResetError instead.
            for worker in workers:
                worker.join()
        # They die while the report is being made: DataLoader's handler raises once for each loader.
        raise Dying([worker.pid for worker in workers])
    fabric.barrier()

class Dying(Exception):
    def __str__(self):
        if self.args[0]:
            os.kill(self.args[0].pop(), signal.SIGKILL)
        return "a fish"

if __name__ == "__main__":
    word, how = sys.argv[1:]
    Fabric(accelerator="cpu", devices=2, launcher=word).launch(work, how)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "how", "words"),
    [("fork", "report", "Dying: a fish"), ("forkserver", "abort", "RuntimeError: DataLoader worker")],
)
def test_data_loader_workers_that_die_neither_replace_nor_garble_a_report(
    tmp_path: Path, word: str, how: str, words: str
) -> None:
    (tmp_path / "script.py").write_text(WORKERS)
    done = run([tmp_path / "script.py", word, how])
    assert done.returncode == 1, done.stderr
    assert re.search(rf"rank 1 of 2 failed first: (__main__\.)?{words}", done.stderr), done.stderr


def fail_and_be_interrupted(world: World, at_call: int) -> None:
    """Raise, and once more at one of the next calls, as a handler of a signal may do."""
    left = iter(range(at_call))

    def interrupt(frame: FrameType, event: str, arg: object) -> None:
        if next(left, None) is None:
            sys.settrace(None)
            raise RuntimeError("of a signal handler")

    if world.rank == 1:
        sys.settrace(interrupt)
        raise ValueError("a fish")
    time.sleep(60)


@pytest.mark.parametrize("at_call", range(6))
def test_a_signal_handler_that_raises_does_not_replace_a_report(at_call: int) -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2 failed first: ValueError: a fish"):
        run_world(2, fail_and_be_interrupted, at_call)


def abort_in_a_thread(world: World) -> None:
    """As gloo's threads do: the one that aborts runs no Python."""
    dist.init_process_group("gloo", store=join(world, 60, print), rank=world.rank, world_size=world.size)
    library = ctypes.CDLL(None)
    if world.rank == 0:
        time.sleep(60)  # with it, the other rank could come to its end before the abort does
    abort = ctypes.cast(library.abort, ctypes.c_void_p)
    library.pthread_create(ctypes.byref(ctypes.c_ulong()), None, abort, None)
    dist.all_reduce(torch.ones(1))


def test_an_abort_in_a_library_s_thread_shows_where_the_main_thread_was(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 2 failed first: killed by SIGABRT \(it aborted itself; .* gloo"):
        run_world(2, abort_in_a_thread)
    assert "in abort_in_a_thread\n" in capfd.readouterr().err
