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


class Guardian:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        import subprocess

        reader, self._writer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
            cwd="/",
        )
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


def _guard() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # those that a scheduler sends to all processes of a job
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
