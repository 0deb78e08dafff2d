"""A thread on each rank that reports what the rank is doing, and asks the other ranks if it waits for too long.

# Note [Silent until something waits]
A rank that does not wait sends nothing: its thread reads the flight recorder every few seconds, and listens. A rank
that has waited in a collective for `report_after_seconds` notifies rank 0's watcher (or the next rank's, if that does
not answer), which asks every rank once and prints one table. It uses connections of its own (`questions.py`), because
the process group is what hangs. If the ranks go on waiting, it is notified again after twice the time.

# Note [Slow or lost]
A rank that is slow, stopped or holds the GIL is waited for. All ranks fail if none of them can go on:
- Two tables in a row show each rank waiting in the same call, and these calls never complete: other ranks wait in
  another call of all ranks, or in another operation of that number. (Backends match calls by their number.)
- The same, with ranks that have ended, or whose machine cannot be reached. gloo notices that a connection is closed,
  NCCL does not.
- The timeout of a call on an accelerator is over. gloo raises in the thread that waits; NCCL would abort the process a
  minute later, with the C++ stack of a thread of its own.
Under a launcher that is not ours each rank ends itself: its main thread cannot be woken up.

Cost: one request to the store and one open port per rank, and 0.1 ms of the GIL every few seconds.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, final

from fabric.launchers.process.failure import departure, describe
from fabric.launchers.process.network import own_address
from fabric.launchers.process.reports import failure_of
from fabric.launchers.process.stack import frames_of, is_within, users_line
from fabric.launchers.rank.rank import own_supervisor
from fabric.launchers.watch.questions import Listener, Place, Silence, ask_all
from fabric.launchers.watch.table import (
    DIVERGED,
    ELSEWHERE,
    Activity,
    Call,
    Kind,
    first_difference,
    waiting_calls,
    who_waits,
    why_none_continues,
)
from fabric.launchers.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ANSWER_SECONDS = 1.5
"""How long a rank may take to answer. Its thread needs the GIL, which an operation holds for milliseconds."""
LAST_WORDS_SECONDS = 3.0
"""How long before a collective times out the recorded calls are compared: after it, ranks end. A third of the timeout
if that is less."""
NOTED_SECONDS = 0.5
"""How long a call on an accelerator may still be recorded as pending after it: torch's thread looks every 0.1 s."""
TIMED_OUT = "A collective on the accelerator has waited for all of its `timeout_seconds`."
ADVICE = (
    'Make all ranks call the same operations, in the same order. With `sanitize="always"`, or `fabric run --sanitize '
    "always`, each call is compared before it runs."
)
MOST_CHARACTERS = 16000
"""How much of the message of a failure is sent to each of the other ranks: its end."""
LOOK_SECONDS = 5.0
"""The longest interval between two looks at the flight recorder."""
NUM_SPEAKERS = 4
"""How many lower ranks a rank tries to notify before it asks all ranks itself."""
RANK_ZEROS_ORDER = "strategies/loader_hook.py", ("lead",)
DATA_LOADER = "torch/utils/data/dataloader.py", ("_next_data", "_try_get_data", "_get_data")
"""Functions in which an iterator waits for its workers."""
PEER_TO_PEER = "torch/distributed/distributed_c10d.py", ("send", "recv")
"""Functions that wait for another rank, which the flight recorder omits on gloo (torch 2.13)."""


FIRST_LEFT = "watch/first_left"
"""The key of the rank that has closed its fabric first, and how far its loop was."""
_NEVER = float("inf")


class Journal(Protocol):
    """The last collectives of this process, and whether some are pending."""

    def is_waiting(self) -> bool:
        """Whether a call is pending. Fast."""

    def calls(self, *, with_lines: bool) -> Sequence[Call]:
        """The last calls of all groups, oldest first; without lines fast."""


@final
class Watcher:
    """Watches one rank, and prints the table of the job if this is the rank that does.

    Created on every rank by the thread that runs the loop, with the `store` of all ranks; each rank closes its own.
    `report_after_seconds`: how long a call may wait before the ranks are asked. `progress`: see `Activity`.
    """

    def __init__(
        self,
        world: World,
        store: "Store",
        journal: Journal,
        report_after_seconds: float,
        progress: Callable[[], str] = lambda: "",
    ) -> None:
        self._world, self._store, self._journal, self._progress = world, store, journal, progress
        self._report_after = report_after_seconds
        self._thread_id = threading.get_ident()
        self._told: tuple[str, float] | None = None
        """The call that was reported, and how long it will have waited when it is reported again."""
        self._asked_at = -_NEVER
        self._printed_at: dict[str, float] = {}
        """When this rank has printed the table, by the question: waits, ends or over."""
        self._waited_in: dict[int, Call] = {}
        """The call in which each rank waited at the last table that this rank has printed."""
        self._one_at_a_time = threading.Lock()
        address, token = own_address(world), secrets.token_hex(8)
        self._listener = Listener(address, token, self._answer)
        self._place = Place(
            rank=world.rank,
            host=socket.gethostname(),
            address=address or "127.0.0.1",
            port=self._listener.port,
            pid=os.getpid(),
            token=token,
        )
        store.set(_key(world.rank), self._place.to_bytes())  # type: ignore[arg-type]
        self._supervisor = own_supervisor()
        if self._supervisor is not None:
            self._supervisor.send(self._place)
            self._supervisor.progress = progress
        else:
            self._hook, sys.excepthook = sys.excepthook, self._uncaught
        self._thread = threading.Thread(target=self._run, daemon=True, name="fabric-watch")
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the port; without a supervisor tell the others that this rank leaves."""
        self._listener.close()
        self._thread.join()
        if self._supervisor is None:
            sys.excepthook = self._hook
            with contextlib.suppress(RuntimeError):  # the store has ended: so have the others
                self._store.compare_set(FIRST_LEFT, "", f"{self._world.rank} {self._progress()}")

    # What this rank does

    def activity(self) -> Activity:
        """What the rank is doing now."""
        calls, now_ns = tuple(self._journal.calls(with_lines=True)), time.time_ns()
        frames = frames_of(sys._current_frames().get(self._thread_id))
        where = users_line(frames)
        kind: Kind = "python"
        words, seconds = "runs Python", calls[-1].seconds(now_ns) if calls else None
        pending = next((call for call in calls if call.pending), None)
        if pending is not None:
            kind, words, seconds = "collective", f"waits in {pending.operation}", pending.seconds(now_ns)
            if _line(pending.where) not in ("", _line(where)):
                words, where = f"{words}, {ELSEWHERE}{where}", pending.where
        elif is_within(frames[:1], *PEER_TO_PEER):
            kind, words, seconds = "collective", f"waits in {frames[0][2]}", None
        elif is_within(frames[:1], *RANK_ZEROS_ORDER):
            kind, words, seconds = "collective", "waits for rank 0 to begin an epoch of its DataLoader", None
        elif is_within(frames, *DATA_LOADER):
            kind, words = "loader", "waits for a worker of its DataLoader"
        progress = self._progress()
        return Activity(
            rank=self._world.rank, kind=kind, words=words, where=where, progress=progress, seconds=seconds, calls=calls
        )

    # The thread

    def _run(self) -> None:
        next_look = time.monotonic()
        while self._listener.turn(max(0.01, next_look - time.monotonic())):
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self._look()

    def _look(self) -> float:
        """Report a call that waits too long, and again after twice the time. Returns seconds until the next look."""
        pause = min(max(self._report_after / 6, 0.05), LOOK_SECONDS)
        calls = self._journal.calls(with_lines=False) if self._journal.is_waiting() else ()
        call = next((call for call in calls if call.pending), None)
        if call is None:
            self._told = None
            return pause
        name, waited = f"{call.group}/{call.number}", call.seconds(time.time_ns())
        # A call on an accelerator raises nothing in the thread that waits.
        timeout = call.timeout_seconds or _NEVER
        left = timeout - waited + (NOTED_SECONDS if call.is_on_device else -min(LAST_WORDS_SECONDS, timeout / 3))
        due = self._told[1] if self._told is not None and self._told[0] == name else self._report_after
        is_last = left <= 0 and due != _NEVER
        if is_last or waited >= due:
            self._told = name, _NEVER if is_last else 2 * due
            if is_last or time.monotonic() - self._asked_at > self._report_after / 2:
                question = "waits" if not is_last else "over" if call.is_on_device else "ends"
                threading.Thread(target=self._tell, args=(question,), daemon=True, name="fabric-watch-tell").start()
        return min(pause, max(left, 0.05)) if left > 0 else pause

    def _tell(self, question: str) -> None:
        """Let the lowest rank that answers ask all ranks and print; this rank, if none of them answers."""
        with contextlib.suppress(Exception):  # the store may be gone: the job is ending
            for place in self._places(range(min(self._world.rank, NUM_SPEAKERS))):
                if isinstance(ask_all([place], question, ANSWER_SECONDS)[place.rank], bytes):
                    return
            self._print(question)

    def _answer(self, question: str) -> bytes:
        word, _, rest = question.partition(" ")
        match word:
            case "activity":
                self._asked_at = time.monotonic()
                return self.activity().to_bytes()
            case "waits" | "ends" | "over":
                threading.Thread(target=self._print, args=(word,), daemon=True, name="fabric-watch-ask").start()
            case "failed":
                self._report(json.loads(rest))
                self._leave()
            case "table":
                return (self.table(if_waiting_seconds=float(rest)) or " ").encode()
        return b"ok"

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Name the rank that left first, in the place of the traceback of a collective that has lost it."""
        own, left = failure_of(self._world.rank, time.monotonic_ns(), error, self._progress()), ""
        with contextlib.suppress(RuntimeError):
            if self._store.check([FIRST_LEFT]):
                left = self._store.get(FIRST_LEFT).decode()
        if not own.lost_peer or not left:
            self._hook(kind, error, trace)
            return
        rank, _, progress = left.partition(" ")
        gone = departure(int(rank), own.at_ns, f"left {progress}".rstrip())
        print(describe([own], self._world.size, [gone]), file=sys.stderr, flush=True)

    # The whole job

    def table(self, *, if_waiting_seconds: float = 0.0) -> str:
        """The table; empty if no rank has waited in a collective for that long."""
        activities = self._all_activities()
        waited = max((each.seconds or 0.0 for each in activities if each.kind == "collective"), default=-1.0)
        return "" if waited < if_waiting_seconds else who_waits(activities)

    def _print(self, question: str) -> None:
        """Print the table for ranks that wait, whose call ends in seconds, or whose call on an accelerator is over."""
        with contextlib.suppress(Exception), self._one_at_a_time:
            apart = self._report_after / 2 if question == "waits" else LAST_WORDS_SECONDS
            if time.monotonic() - self._printed_at.get(question, -_NEVER) < apart:
                return
            activities = self._all_activities()
            self._printed_at[question] = time.monotonic()
            if question != "over":
                difference = first_difference(activities) if question == "ends" else ""
                words = "\n".join([who_waits(activities), difference]).rstrip()
                if self._supervisor is not None:
                    self._supervisor.send(words)
                else:
                    print(words, file=sys.stderr, flush=True)
            why = TIMED_OUT if question == "over" else why_none_continues(activities, self._waited_in)
            self._waited_in = waiting_calls(activities)
            if why:
                difference, table = first_difference(activities), who_waits(activities)
                parts = (why, table, difference, ADVICE) if why == DIVERGED else (why, difference, table)
                self._end_all("\n".join(filter(None, parts)))

    def _end_all(self, words: str) -> None:
        """Fail all ranks, with this message."""
        others = [place for place in self._places(range(self._world.size)) if place.rank != self._world.rank]
        self._report(words)  # before the others end: their launcher may then end this rank
        ask_all(others, f"failed {json.dumps(words[-MOST_CHARACTERS:])}", ANSWER_SECONDS)
        self._leave()

    def _report(self, words: str) -> None:
        """Report a failure of this rank to its supervisor; if another launcher has started it, print the failure."""
        if self._supervisor is not None:
            self._supervisor.failure(RuntimeError(words))
        else:
            print(f"rank {self._world.rank}: RuntimeError: {words}", file=sys.stderr, flush=True)

    def _leave(self) -> None:
        """End this process if no supervisor does soon: the main thread, in a collective, cannot be woken up."""
        if self._supervisor is None:
            os._exit(1)

    def _all_activities(self) -> list[Activity]:
        """The activities of all ranks, in rank order."""
        places = self._places(range(self._world.size))
        answers = ask_all([place for place in places if place.rank != self._world.rank], "activity", ANSWER_SECONDS)
        activities = {self._world.rank: self.activity()}
        for rank, answer in answers.items():
            if isinstance(answer, bytes):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    activities[rank] = Activity.from_bytes(answer)
        return [activities.get(place.rank) or self._absent(place, answers[place.rank]) for place in places]

    def _places(self, ranks: Iterable[int]) -> list[Place]:
        """Uses a connection of its own: the main thread's may be blocked."""
        store = self._store.clone()  # type: ignore[attr-defined]
        return [Place.from_bytes(each) for each in store.multi_get([_key(rank) for rank in ranks])]

    def _absent(self, place: Place, answer: bytes | Silence) -> Activity:
        """The state of a rank that did not answer."""
        gone: dict[object, str] = {"refused": "has ended, or closed its fabric", "unreachable": "cannot be reached"}
        silent = f"does not answer: process {place.pid} is stopped, or in C code that holds Python's lock"
        kind: Kind = "gone" if answer in gone else "silent"
        where = "" if self._world.num_nodes == 1 else f"on {place.host}"
        return Activity(rank=place.rank, kind=kind, words=gone.get(answer, silent), where=where)


def _line(where: str) -> str:
    return where.partition(" in ")[0]


def _key(rank: int) -> str:
    return f"watch/{rank}"
