"""Signals received by the supervisor while ranks run: a list, and a descriptor that wakes its wait."""

import contextlib
import os
import signal
import threading
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a job."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are forwarded to the ranks, such as SLURM's warning before a time limit."""


class Signals:
    """Between `install` and `restore` signals are recorded in `received`, and not handled.

    A signal that was ignored (`nohup`) stays ignored. Python delivers signals to the main thread alone: nothing is
    recorded where another thread launches.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wake_fd, self._writer = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._writer, False)
        self._before: dict[int, Any] = {}
        self._before_fd: int | None = None

    def install(self) -> None:
        """Record signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._before_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in ENDING + PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, frame: self.received.append(number))

    def restore(self) -> None:
        """Restore handlers and wake-up descriptor. A second call does nothing."""
        if self.wake_fd < 0:
            return
        for number, handler in self._before.items():
            # None: installed by C code, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._before_fd is not None:
            signal.set_wakeup_fd(self._before_fd)
        os.close(self.wake_fd)
        os.close(self._writer)
        self.wake_fd = -1

    def drain(self) -> None:
        """Empty the wake-up pipe, which has what was recorded already."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake_fd, 4096):
                pass
