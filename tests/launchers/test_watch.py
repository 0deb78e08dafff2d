"""What a job says while it hangs: the parts that need no ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import fabric.fabric
from fabric.launchers.process.stack import users_line
from fabric.launchers.watch.questions import Listener, Place, ask_all
from fabric.launchers.watch.table import (
    DIVERGED,
    GONE,
    GRADIENTS,
    WORLD,
    Activity,
    Call,
    Kind,
    first_difference,
    ranks_in_words,
    waiting_calls,
    who_waits,
    why_none_continues,
)


def doing(rank: int, words: str, kind: Kind = "collective", seconds: float | None = 31.0, **more: str) -> Activity:
    return Activity(rank=rank, kind=kind, words=words, seconds=seconds, **more)


def made(
    rank: int,
    *operations: str,
    kind: Kind = "collective",
    first: int = 1,
    group: str = WORLD,
    is_pending: bool = False,
) -> Activity:
    calls = tuple(
        Call(
            group=group,
            number=number,
            operation=operation,
            where=f"train.py:{number}",
            started_ns=0,
            pending=is_pending,
        )
        for number, operation in enumerate(operations, first)
    )
    return Activity(rank=rank, kind=kind, words="", calls=calls)


def test_ranks_that_do_the_same_share_a_line() -> None:
    activities = [doing(rank, "waits in all_reduce", where="a.py:3 in main") for rank in (0, 1, 3)]
    activities.insert(2, doing(2, "runs Python", "python", 33.0, where="a.py:9 in save", progress="after 7 steps"))
    assert who_waits(activities).splitlines() == [
        "3 of 4 ranks wait in a collective, for up to 31 s.",
        "  ranks 0-1, 3  a.py:3 in main: waits in all_reduce         31 s",
        "  rank 2        a.py:9 in save, after 7 steps: runs Python  last collective 33 s ago",
        "The others wait for rank 2, which may be slow, or in another part of the program.",
    ]


def test_a_rank_that_does_not_answer_is_the_one_that_is_waited_for() -> None:
    words = who_waits(
        [doing(0, "waits in barrier"), doing(1, "does not answer", "silent", None), doing(2, "", "python")]
    )
    assert words.endswith("The others wait for rank 1.")


def test_ranks_that_wait_in_different_calls_are_said_to() -> None:
    words = who_waits([made(0, "barrier", is_pending=True), made(1, "broadcast of float32 (3,)", is_pending=True)])
    assert words.endswith("They wait in different calls.")


def stuck(*activities: Activity) -> str:
    """Why none goes on if two tables in a row show this."""
    return why_none_continues(activities, waiting_calls(activities))


@pytest.mark.parametrize(
    "other",
    [
        made(1, "all_reduce of float32 (2,)", is_pending=True),
        made(1, "all_gather of float32 (3,)", group="3", is_pending=True),  # rank 0 may be outside of it
        made(1, "recv of int64 (1,)", is_pending=True),
        doing(1, "runs Python", "python"),
        doing(1, "does not answer", "silent"),
    ],
)
def test_ranks_whose_calls_may_still_meet_go_on(other: Activity) -> None:
    assert stuck(made(0, "all_reduce of float32 (2,)", is_pending=True), other) == ""


def test_a_rank_that_runs_python_while_its_call_goes_on_goes_on() -> None:
    busy = Activity(**{**vars_of(waiting(1, "w1", "w2")), "words": "waits in all_reduce, and Python is at train.py:9"})
    assert stuck(waiting(0, "g2"), busy) == ""


def vars_of(activity: Activity) -> dict[str, Any]:
    return {name: getattr(activity, name) for name in Activity.__dataclass_fields__}


def test_ranks_that_wait_in_one_operation_on_other_tensors_never_go_on() -> None:
    reduces = (
        made(0, "all_reduce of float32 (6,)", is_pending=True),
        made(1, "all_reduce of float64 (2,)", is_pending=True),
    )
    assert stuck(*reduces) == DIVERGED
    gathers = (
        made(0, "all_gather of float32 (6,)", is_pending=True),
        made(1, "all_gather of float32 (2,)", is_pending=True),
    )
    assert stuck(*gathers) == ""  # NCCL gathers tensors of any size


def waiting(rank: int, *names: str) -> Activity:
    """A rank in the last of these calls, each written as group and number: `g3`."""
    calls = [
        Call(
            group=WORLD if name[0] == "w" else f"1 ({GRADIENTS})" if name[0] == "g" else name[0],
            number=int(name[1:]),
            operation="all_reduce of float32 (2,)",
            where="",
            started_ns=0,
            pending=name == names[-1],
        )
        for name in names
    ]
    return Activity(rank=rank, kind="collective", words="", calls=tuple(calls))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((["w1", "g1", "g2"], ["w1", "g1", "w2"]), DIVERGED),
        ((["w1", "g1", "g2"], ["w1", "g1", "g2"]), ""),
        ((["w1", "w2"], ["w1"]), DIVERGED),
        ((["a1", "b1"], ["a1", "c1"]), ""),  # ranks may be outside of these groups
        ((["a1", "b1", "b2"], ["a1", "b1", "a2"]), DIVERGED),  # both have made a call in each
        ((["a1", "b2"], ["a1", "g1"], ["a1", "w2"]), DIVERGED),
    ],
)
def test_ranks_that_stay_in_different_calls_of_all_ranks_never_go_on(
    ranks: tuple[list[str], ...], expected: str
) -> None:
    assert stuck(*(waiting(rank, *names) for rank, names in enumerate(ranks))) == expected


def test_a_rank_that_has_moved_since_the_last_table_goes_on() -> None:
    before = waiting_calls([waiting(0, "g2"), waiting(1, "w1")])
    now = [waiting(0, "g2"), waiting(1, "w2")]
    assert why_none_continues(now, before) == why_none_continues(now, {}) == ""
    assert why_none_continues(now, waiting_calls(now)) == DIVERGED


def test_a_rank_that_is_gone_is_waited_for_by_a_call_of_all_ranks_alone() -> None:
    gone, late = doing(2, "has ended", "gone", None), doing(2, "runs Python", "python")
    of_some, gradients = waiting(0, "w1", "a1"), waiting(0, "w1", "g1")
    found = [stuck(one, other) for one in (of_some, gradients) for other in (late, gone)]
    assert found == ["", "", "", GONE]


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([5, 1, 0, 2]) == "ranks 0-2, 5"


def test_the_first_call_at_which_ranks_diverge_is_named() -> None:
    one, other = made(0, "barrier", "all_reduce of float32 (2,)"), made(1, "barrier", "all_reduce of float32 (3,)")
    assert first_difference([one, other]).splitlines() == [
        "In the process group of all ranks the ranks diverge at call 2:",
        "  call 1, on all ranks: train.py:1: barrier",
        "  call 2, rank 0: train.py:2: all_reduce of float32 (2,)",
        "  call 2, rank 1: train.py:2: all_reduce of float32 (3,)",
    ]


def test_a_rank_that_has_not_made_the_call_is_named() -> None:
    words = first_difference([made(0, "barrier", "barrier"), made(1, "barrier"), made(2)])
    assert "call 1, rank 2: has not made it" in words


def test_journals_that_begin_at_different_calls_are_compared_where_both_reach() -> None:
    assert first_difference([made(0, "barrier", "all_reduce"), made(1, "all_reduce", first=2)]) == ""


def test_a_silent_rank_and_one_outside_of_a_group_do_not_differ() -> None:
    assert first_difference([made(0, "barrier"), made(1, kind="silent")]) == ""
    assert first_difference([made(0, "barrier", group="3"), made(1)]) == ""


def test_operations_whose_shapes_may_differ_are_compared_by_name() -> None:
    assert first_difference([made(0, "all_to_all of int64 (2,)"), made(1, "all_to_all of int64 (5,)")]) == ""


def test_an_activity_can_be_serialized() -> None:
    activity = made(3, "barrier", "all_reduce")
    assert Activity.from_bytes(activity.to_bytes()) == activity


def test_the_users_line_is_the_innermost_outside_of_libraries() -> None:
    import torch

    library = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "module.py")
    frames = [
        (os.__file__, 1, "open"),
        (library, 7, "forward"),
        ("/home/me/train.py", 12, "step"),
        ("/x.py", 1, "main"),
    ]
    assert users_line(frames) == "/home/me/train.py:12 in step"
    assert users_line([]) == ""
    method = (fabric.fabric.__file__, 700, "save")
    inner = (fabric.fabric.__file__, 900, "_checkpoints")
    assert users_line([(library, 7, "f"), inner, method, *frames[2:]]) == "fabric.save, /home/me/train.py:12 in step"
    assert users_line([method, inner, *frames[2:]]) == "/home/me/train.py:12 in step"
    called = (library, 9, "_call_impl")
    assert users_line([(library, 7, "f"), called, *frames[2:]]) == "forward of a module, /home/me/train.py:12 in step"
    gathered = (fabric.loop.gather_parameters.__file__, 9, "gathered")
    contexts = (os.__file__.replace("os.py", "contextlib.py"), 7, "__enter__")
    assert users_line([called, gathered, contexts, *frames[2:]]) == "fabric.gathered, /home/me/train.py:12 in step"
    assert users_line([inner, (fabric.session.__file__, 143, "_close_at_exit")]) == "the end of the program"
    of_a_function = [inner, (fabric.fabric.__file__, 300, "close"), (fabric.fabric.__file__, 1080, "_run"), inner]
    assert users_line(of_a_function) == "the end of the program"


@contextmanager
def listening(token: str = "secret") -> Iterator[Place]:
    listener = Listener("127.0.0.1", token, lambda question: f"{question}!".encode())

    def serve() -> None:
        while listener.turn(10.0):
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield Place(rank=4, host="here", address="127.0.0.1", port=listener.port, pid=os.getpid(), token=token)
    listener.close()
    thread.join()


def test_a_question_is_answered() -> None:
    with listening() as place:
        assert ask_all([place], "why", 10.0) == {4: b"why!"}


def test_whoever_does_not_know_the_token_gets_no_answer() -> None:
    with listening() as place:
        other = Place(rank=4, host="", address=place.address, port=place.port, pid=0, token="guess")
        assert ask_all([other], "why", 10.0) == {4: "refused"}
        assert ask_all([place], "still there", 10.0) == {4: b"still there!"}


def test_a_port_that_was_closed_refuses() -> None:
    with listening() as place:
        pass
    assert ask_all([place], "why", 10.0) == {4: "refused"}


def test_a_port_is_closed_although_no_file_can_be_opened() -> None:
    listener = Listener("127.0.0.1", "secret", lambda question: b"")
    turns: list[bool] = []
    thread = threading.Thread(target=lambda: turns.extend(iter(lambda: listener.turn(0.1), False)), daemon=True)
    thread.start()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    with contextlib.ExitStack() as files:
        with contextlib.suppress(OSError):
            while True:
                files.enter_context(open(os.devnull))
        listener.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    thread.join(60)
    assert not thread.is_alive(), "it waits for a connection that close() could not make"


def test_a_process_that_accepts_and_never_answers_is_silent() -> None:
    listener = Listener("127.0.0.1", "secret", lambda question: b"")
    place = Place(rank=1, host="", address="127.0.0.1", port=listener.port, pid=0, token="secret")
    assert ask_all([place], "why", 0.2) == {1: "silent"}
    listener.close()
    assert not listener.turn(1.0)
