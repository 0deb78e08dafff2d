"""Coordinated stop: a signal on any rank ends the loop of all ranks at the same step, without a collective per step.

Each rank counts its reads of `should_stop`. After a stop request, a thread on each rank publishes its count in the
job's store, and all ranks stop at the first step that no rank has passed yet. Before a request, a read costs an
uncontended lock. Of SIGINT (Ctrl-C) the first is a request, and the second does what it does in other programs.

Source: the synchronisation point of multi-host preemption in JAX and Orbax, here over torch's store.
"""

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

from fabric.launchers.rendezvous.join import join
from fabric.launchers.world import World

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if name in dir(signal)]
_FOREVER = timedelta(days=365)


@final
class StopRequest:
    """Whether this job was requested to stop.

    Ranks: all create one; the constructor returns once all have. `timeout_seconds`: after a stop request, how long a
    rank waits for the others to read `should_stop` before it raises.
    """

    def __init__(self, world: World, report: Callable[[str], None], timeout_seconds: float = 300.0) -> None:
        self._rank, self._size = world.rank, world.size
        self._store = join(world, timeout_seconds, report)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._condition = threading.Condition()
        self._pid = os.getpid()
        self._asked = 0
        self._pending = False
        self._stop_at: int | None = None
        self._failure: Exception | None = None
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._on_signal) for number in heard}
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fabric-stop")
        self._watcher.start()

    def request(self) -> None:
        """Request all ranks to stop. Any rank may call it, alone."""
        if self._size == 1:
            self._agree(0)
        ranks = [f"stop/{rank}" for rank in range(self._size)]
        self._store.multi_set(ranks, ["stop"] * self._size)  # type: ignore[attr-defined]

    def reached(self) -> bool:
        """Whether the loop ends here. Ranks: all call it once per step."""
        with self._condition:
            if self._pending:
                self._condition.wait_for(lambda: self._stop_at is not None or self._failure is not None)
                if self._failure is not None:
                    raise self._failure
            self._asked += 1
            return self._stop_at is not None and self._asked >= self._stop_at

    def close(self) -> None:
        """Restore the signal handlers, and end the thread."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._store.set(f"stop/{self._rank}", "close")
        self._watcher.join()

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a child that the rank has forked, to which the request does not belong
            signal.signal(number, self._handlers[number])
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            signal.signal(number, self._handlers[number])  # a second Ctrl-C interrupts
        # The main thread may hold the store's lock right now, so another thread uses the store.
        threading.Thread(target=self.request, daemon=True, name="fabric-stop-request").start()

    def _watch(self) -> None:
        store: Any = self._store.clone()  # type: ignore[attr-defined]  # a connection of its own: this one blocks
        store.wait([f"stop/{self._rank}"], _FOREVER)
        if store.get(f"stop/{self._rank}") == b"close":
            return
        with self._condition:
            self._pending = True
            mine = self._asked
        store.set(f"asked/{self._rank}", str(mine))
        try:
            if store.add("num_asked", 1) == self._size:  # the last rank reads all counts, once
                counts = store.multi_get([f"asked/{rank}" for rank in range(self._size)])
                store.set("stop_at", str(max(map(int, counts)) + 1))
            store.wait(["stop_at"], self._timeout)
            self._agree(int(store.get("stop_at")))
        except Exception as error:
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _agree(self, stop_at: int) -> None:
        with self._condition:
            self._pending, self._stop_at = True, stop_at
            self._condition.notify_all()
