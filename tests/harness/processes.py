"""Find and end the processes of a test, by a marker in their environment, even after their parents have ended."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import template
from template import MARK

PATIENCE_SECONDS = 30.0
"""How long a test waits for something that must happen. Only a failing test waits that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program under test, and all its descendants."""

    mark: str
    process: subprocess.Popen[str]

    def descendants(self) -> dict[int, str]:
        """Live processes with the marker, except the program itself, with their command lines."""
        return {pid: words for pid, words in marked(self.mark).items() if pid != self.process.pid}

    def wait_for(self, words: str, times: int = 1) -> str:
        """Read stdout until `words` has occurred `times` times."""
        assert self.process.stdout is not None
        text, deadline = "", time.monotonic() + PATIENCE_SECONDS
        while text.count(words) < times:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536).decode() if ready else ""
            if not data:
                raise AssertionError(f"{words!r} came {text.count(words)} times of {times}; stdout was:\n{text}")
            text += data
        return text


def marked(mark: str) -> dict[int, str]:
    """Live processes whose environment has the marker, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@contextmanager
def running(arguments: Sequence[str | Path], **environ: str) -> Iterator[Program]:
    """A Python program in its own session with its output piped; remaining processes are killed afterwards."""
    mark = uuid.uuid4().hex
    process = template.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: mark, **environ},
    )
    try:
        yield Program(mark=mark, process=process)
    finally:
        process.kill()
        process.communicate()
        while left := marked(mark):
            for pid in left:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue


def all_gone(program: Program, within_seconds: float = 5.0) -> dict[int, str]:
    """Wait until the program's descendants have ended, or for the timeout; returns those that are left."""
    deadline = time.monotonic() + within_seconds
    while (left := program.descendants()) and time.monotonic() < deadline:
        os.sched_yield()
    return left


def run(
    arguments: Sequence[str | Path], *, stdin: str = "", fresh: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end. Returns its output and exit code; no process of it is left.

    `fresh`: in an interpreter of its own, which has not imported torch. Cheaper for a program that starts interpreters
    and needs no torch itself: ranks import what the program that started them has imported.
    """
    mark = uuid.uuid4().hex
    done = template.run(
        [sys.executable, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        fresh=fresh,
        env={**os.environ, MARK: mark, **environ},
        check=False,
    )
    deadline = time.monotonic() + 5
    while (left := marked(mark)) and time.monotonic() < deadline:
        os.sched_yield()
    assert not left, f"outlived the program: {left}"
    return done


def free_port() -> int:
    """A free port, outside the range from which the system hands out ports by itself.

    Processes that search at the same time start at distant ports.
    """
    for port in range(10_000 + 997 * os.getpid() % 19_000, 30_000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("every port from 10000 to 30000 is taken")
