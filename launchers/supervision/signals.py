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

    A signal that was ignored (`nohup`) stays ignored. Outside the main thread Python delivers no signals: there the
    guardian writes those of the process group (Ctrl-C) to `guardian_fd`, and the main thread gets them as well.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wake_fd, self._writer = os.pipe()
        self.guardian_fd = None if threading.current_thread() is threading.main_thread() else self._writer
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._writer, False)
        self._before: dict[int, Any] = {}
        self._before_fd: int | None = None

    def install(self) -> None:
        """Record signals from now on."""
        if self.guardian_fd is not None:
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
        """Empty the wake-up pipe, which has what was recorded already, or what the guardian has received."""
        with contextlib.suppress(BlockingIOError):
            while numbers := os.read(self.wake_fd, 4096):
                self.received += numbers if self.guardian_fd is not None else b""
