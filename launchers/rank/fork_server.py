"""A process that has imported torch, does nothing else, and forks ranks on request in 25-50 ms.

It is started by the first launch that needs it, and serves later ones. It ends with its only client, whose socket is
closed; its ranks end with it, by the kernel's parent-death signal.

Unlike with `multiprocessing`'s fork server, ranks get the standard streams of the launch and not of the server, the
supervisor gets the exit code, no resource tracker is left, and the modules to preload are chosen by fabric alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fabric.launchers.rank.task import CallFunction
    from fabric.launchers.supervision.supervisor import Child
    from fabric.launchers.world import World

NUMBER = struct.Struct("!i")
MAX_REQUEST_BYTES = 1 << 18

# Note [One fork server per process]
# It belongs to the process and not to a launcher, so that the next launch uses it.
_servers: list[ForkServer] = []
_servers_lock = threading.Lock()


def fork_server() -> ForkServer:
    """The fork server of this process; a new one if there is none, or it has died."""
    with _servers_lock:
        if not _servers or not _servers[-1].is_usable:
            _servers[:] = [ForkServer()]
        return _servers[-1]


class ForkServer:
    """The client's side."""

    def __init__(self) -> None:
        self._socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(server.fileno())], pass_fds=(server.fileno(),), start_new_session=True
            )
        self._lock, self._owner = threading.Lock(), os.getpid()
        atexit.register(self.close)

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and was started by this process and not by the one that this was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def start(self, world: World, task: CallFunction, preload: tuple[str, ...]) -> Child:
        """Fork one rank."""
        from fabric.launchers.rank import task as tasks
        from fabric.launchers.supervision.supervisor import Child

        report_reader, report_writer = os.pipe()
        status_reader, status_writer = os.pipe()
        request = pickle.dumps((sys.path, preload))
        with tasks.write(world, task) as file, _standard_streams() as streams, self._lock:
            socket.send_fds(self._socket, [request], [file.fileno(), report_writer, status_writer, *streams])
            answer = self._socket.recv(NUMBER.size)
        os.close(report_writer)
        os.close(status_writer)
        if not answer:
            raise RuntimeError(
                f"The fork server ended with exit code {self._process.wait()} while it imported {', '.join(preload)}. "
                "Its output is on stderr; `launcher='spawn'` does not need it."
            )

        def reap() -> int:
            status = os.read(status_reader, NUMBER.size)
            # No status: the server died, and its ranks with it.
            return int(NUMBER.unpack(status)[0]) if status else -signal.SIGKILL

        return Child(
            rank=world.rank,
            pid=NUMBER.unpack(answer)[0],
            exit_fd=status_reader,
            reap=reap,
            report_fd=report_reader,
        )

    def close(self) -> None:
        """End the server, and its ranks with it."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):  # not connected: the server has died
            self._socket.shutdown(socket.SHUT_RDWR)  # closed, it would stay open in processes forked from this one
        self._socket.close()
        self._process.wait()
        atexit.unregister(self.close)


@contextlib.contextmanager
def _standard_streams() -> Any:
    """Descriptors 0, 1 and 2 of this process, with /dev/null in place of a closed one."""
    with open(os.devnull, "r+b") as nothing:
        yield [fd if _is_open(fd) else nothing.fileno() for fd in range(3)]


def _is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False


class Server:
    """The server's side: one thread, which imports and forks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._statuses: dict[int, int] = {}
        """For each rank, the descriptor to write its exit code to."""
        self._imported = set[str]()
        self._wake, self._woken = os.pipe()
        for fd in (self._wake, self._woken):
            os.set_blocking(fd, False)

    def serve(self) -> NoReturn:
        """Answer requests until the client has ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select()]
                if self._wake in ready:
                    self._reap()
                if self._connection.fileno() in ready and not self._answer():
                    os._exit(0)

    def _answer(self) -> bool:
        """Fork one rank; False at the end of the requests."""
        request, fds, _, _ = socket.recv_fds(self._connection, MAX_REQUEST_BYTES, 6)
        if not request:
            return False
        sys.path[:], preload = pickle.loads(request)
        self._import(("fabric.launchers.rank.task", *preload))
        task_fd, report_fd, status_fd, *streams = fds
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(task_fd, report_fd, streams, parent)
        self._statuses[pid] = status_fd
        for fd in (task_fd, report_fd, *streams):
            os.close(fd)
        self._connection.send(NUMBER.pack(pid))
        return True

    def _import(self, names: tuple[str, ...]) -> None:
        from fabric.launchers.process.interpreter import finalizers
        from fabric.launchers.rank.fork_cleanup import freeze

        if self._imported.issuperset(names):
            return
        for name in names:
            import_module(name)
        self._imported.update(names)
        for finalizer in finalizers():  # torch has hundreds, which take a rank 50 ms at its end
            finalizer.atexit = False
        gc.collect()
        freeze()  # ranks share the memory of what is imported, until they look at it

    def _become_rank(self, task_fd: int, report_fd: int, streams: list[int], parent: int) -> NoReturn:
        from fabric.launchers.rank.task import run_task

        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in (self._connection.fileno(), self._wake, self._woken, *self._statuses.values()):
            os.close(fd)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        try:
            with open(task_fd, "rb") as file:
                pickle.load(file)  # the import path, which is part of the request
                run_task(file, report_fd, parent, sys.path)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Report the exit codes of ranks that have ended, and end the processes that they left."""
        from fabric.launchers.process.os_process import kill_group

        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        for pid in list(self._statuses):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid, signal.SIGKILL)  # before it is reaped: then its number may be reused
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            status_fd = self._statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(status_fd, NUMBER.pack(code))
            os.close(status_fd)


if __name__ == "__main__":
    Server(socket.socket(fileno=int(sys.argv[1]))).serve()
