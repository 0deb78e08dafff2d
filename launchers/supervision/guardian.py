"""A small process that outlives the supervisor and kills the processes that a killed supervisor would leave behind.

It reads process ids from a pipe whose only writer is the supervisor. At end of file, however the supervisor ended, it
kills the process groups that are still on its list: ranks, and the data-loader workers they started. The kernel's
parent-death signal is faster, but reaches neither those workers nor ranks that a fork server started.

Runs as a script too, without `site` and without this package: 10 ms, beside the launch and not before it.
"""

import contextlib
import os
import signal
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Guardian:
    """The supervisor's end of the pipe.

    `signals_fd`: where to write the numbers of the signals that reach the supervisor's process group, Ctrl-C among
    them; None: the supervisor receives them itself.
    """

    def __init__(self, signals_fd: int | None = None) -> None:
        import subprocess

        reader, self._writer = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it handles them
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=reader,
            stdout=subprocess.DEVNULL if signals_fd is None else signals_fd,
            stderr=subprocess.DEVNULL,
            start_new_session=signals_fd is None,  # so that Ctrl-C in the terminal does not reach it
            cwd="/",
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)

    def watch(self, pid: int) -> None:
        """Kill the process group of `pid` when the supervisor ends."""
        self._write(b"+%d\n" % pid)

    def forget(self, pid: int) -> None:
        """Forget `pid`, which has ended: its number may be reused."""
        self._write(b"-%d\n" % pid)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; the supervisor still ends its ranks itself
            os.write(self._writer, line)

    def close(self) -> None:
        """End the guardian; processes that it still watches are killed."""
        os.close(self._writer)
        self._process.wait()

    def abandon(self) -> None:
        """Called in a forked rank: it is not the supervisor, and must not keep the pipe open."""
        os.close(self._writer)
        self._process.returncode = 0  # another process's child: not ours to wait for, and no ResourceWarning


def _note(number: int, frame: object) -> None:
    with contextlib.suppress(OSError):  # the supervisor has ended, or its pipe is full
        os.write(1, bytes([number]))


def _guard() -> None:
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    watched: set[int] = set()
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):
            (watched.add if line.startswith(b"+") else watched.discard)(int(line[1:]))
    for pid in watched:
        for send in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                send(pid, signal.SIGKILL)


if __name__ == "__main__":
    _guard()
