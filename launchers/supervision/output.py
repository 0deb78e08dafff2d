"""The output of this node's ranks, on request: copied to a file for each rank, shown with the rank before each line.

Without a request ranks write to the supervisor's own stdout and stderr, and this file does nothing. With one, each rank
has a pipe in place of each of the two, which the supervisor reads: what a rank, its libraries and its subprocesses
wrote before it died is in its file.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from fabric.launchers.launcher import Topology
from fabric.launchers.world import World

READ_BYTES = 1 << 16
"""The capacity of a pipe (Linux)."""
_ENDS = re.compile(rb"(?<=[\r\n])")
"""Progress bars end their lines with a carriage return."""


@final
class Stream:
    """Stdout or stderr of one rank."""

    def __init__(self, reader: int, terminal: int, file: int | None, prefix: bytes) -> None:
        self.reader = reader
        self._terminal, self._file, self._prefix = terminal, file, prefix
        self._begun = b""
        """The start of a line whose end was not read yet."""
        os.set_blocking(reader, False)

    def copy(self) -> bool:
        """Copy what the rank has written since the last call. Returns False at the end of the pipe."""
        while True:
            try:
                written = os.read(self.reader, READ_BYTES)
            except BlockingIOError:
                return True
            if not written:
                return False
            *lines, self._begun = _ENDS.split(self._begun + written)
            self._write_lines(lines)
            if not self._prefix:
                _write(self._terminal, written)

    def flush(self) -> None:
        """Copy all that was written, also a line that has no end yet."""
        self.copy()
        if self._begun:
            self._write_lines([self._begun + b"\n"])
            self._begun = b""

    def close(self) -> None:
        """Close the pipe: processes that outlive the rank can write to it no longer."""
        self.flush()
        os.close(self.reader)

    def _write_lines(self, lines: Sequence[bytes]) -> None:
        """Whole lines, because other streams have the same file and terminal."""
        for line in lines:
            if self._file is not None:
                _write(self._file, line)
            if self._prefix:
                _write(self._terminal, line if line == b"\n" else self._prefix + line)


@final
class Output:
    """The output of the ranks of one launch.

    `topology.log_dir`: the folder of their files, which is created; a file that is there already is continued.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._is_piped = topology.redirects_output
        self._files: dict[int, int] = {}
        self._streams: dict[int, list[Stream]] = {}
        self._own: list[int] = []
        """Copies of descriptors 1 and 2 of this process."""
        if topology.log_dir is not None:
            os.makedirs(topology.log_dir, exist_ok=True)

    @contextlib.contextmanager
    def of(self, world: World) -> Iterator[None]:
        """Context in which the process of a rank is started: its stdout and stderr are those of this process here.

        In a rank that was forked, they stay so.
        """
        if not self._is_piped:
            yield
            return
        if not self._own:
            self._own = [os.dup(fd) for fd in (1, 2)]
        file = self._open(world)
        prefix = f"[rank {world.rank:{len(str(world.size - 1))}}] ".encode() if self._topology.prefix_output else b""
        pipes = [os.pipe() for _ in self._own]
        self._streams[world.rank] = [
            Stream(reader, terminal, file, prefix) for (reader, _), terminal in zip(pipes, self._own, strict=True)
        ]
        for fd, (_, writer) in zip((1, 2), pipes, strict=True):
            os.dup2(writer, fd)
            os.close(writer)
        try:
            yield
        finally:
            for fd, own in zip((1, 2), self._own, strict=False):  # none in a rank, see `abandon`
                os.dup2(own, fd)

    def streams(self, rank: int) -> Sequence[Stream]:
        """The streams of a rank, to be copied whenever their pipe is readable."""
        return self._streams.get(rank, ())

    def note(self, rank: int, words: str) -> None:
        """Add text to the file of a rank: its uncaught exception goes to the supervisor, and not to its stderr."""
        if rank in self._files:
            for stream in self._streams.get(rank, ()):
                stream.flush()
            _write(self._files[rank], f"\n{words}\n".encode())

    def note_failure(self, words: str) -> None:
        """Add the message of a failed launch to `failures.log`, beside the files of the ranks."""
        if self._topology.log_dir is not None:
            path = Path(self._topology.log_dir, "failures.log")
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S')}: {words}\n")

    def end(self, rank: int) -> None:
        """Copy the rest of what an ended rank has written, and close its pipes."""
        for stream in self._streams.pop(rank, ()):
            stream.close()

    def close(self) -> None:
        """Close the files."""
        for fd in (*self._files.values(), *self._own):
            os.close(fd)
        self._files, self._own = {}, []

    def abandon(self) -> None:
        """In a rank that was forked: leave everything to the supervisor."""
        for streams in self._streams.values():
            for stream in streams:
                os.close(stream.reader)
        self.close()

    def _open(self, world: World) -> int | None:
        if self._topology.log_dir is None:
            return None
        path = Path(self._topology.log_dir, f"rank-{world.rank:0{len(str(world.size - 1))}}.log")
        self._files[world.rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.note(world.rank, f"# {time.strftime('%Y-%m-%d %H:%M:%S')}: rank {world.rank} of {world.size} starts")
        return self._files[world.rank]


def _write(fd: int, content: bytes) -> None:
    """Write all of it. If the reader has closed its end (`| head`), the content is dropped, and the ranks continue."""
    with contextlib.suppress(BrokenPipeError):
        while content:
            content = content[os.write(fd, content) :]
