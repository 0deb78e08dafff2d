"""A process that has imported torch, does nothing else, and forks ranks on request in 25-50 ms.

It is started by the first launch that needs it, and serves later ones. It ends with its only client, whose socket is
closed; its ranks end with it, by the kernel's parent-death signal.

Unlike with `multiprocessing`'s fork server, ranks get the standard streams of the launch and not of the server, the
supervisor gets the exit code, no resource tracker is left, and the modules to preload are chosen by fabric alone.
"""

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
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fabric.launchers.rank.task import CallFunction
    from fabric.launchers.supervision.supervisor import Child
    from fabric.launchers.world import World

NUMBER = struct.Struct("!i")
MAX_REQUEST_BYTES = 1 << 18

# Note [One fork server per process]
# It belongs to the process and not to a launcher, so that the next launch uses it.
_servers: "list[ForkServer]" = []
_servers_lock = threading.Lock()


def fork_server() -> "ForkServer":
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
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and was started by this process and not by the one that this was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def start(self, world: "World", task: "CallFunction", preload: tuple[str, ...]) -> "Child":
        """Fork one rank."""
        from fabric.launchers.rank import task as tasks
        from fabric.launchers.supervision.supervisor import Child

        report_reader, report_writer = os.pipe()
        status_reader, status_writer = os.pipe()
        request = pickle.dumps((sys.path, preload))
        with tasks.write(world, task) as file:
            socket.send_fds(self._socket, [request], [file.fileno(), report_writer, status_writer, 0, 1, 2])
        os.close(report_writer)
        os.close(status_writer)
        pid = os.read(status_reader, NUMBER.size)
        if not pid:
            raise RuntimeError(
                f"The fork server ended with exit code {self._process.wait()} while it imported {', '.join(preload)}. "
                "Its output is on stderr; `launcher='spawn'` does not need it."
            )

        def reap() -> int:
            status = os.read(status_reader, NUMBER.size)
            # No status: the server died, and its ranks with it.
            return int(NUMBER.unpack(status)[0]) if status else -signal.SIGKILL

        number = NUMBER.unpack(pid)[0]
        return Child(rank=world.rank, pid=number, exit_fd=status_reader, reap=reap, report_fd=report_reader)

    def close(self) -> None:
        """End the server, and its ranks with it."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):  # not connected: the server has died
            self._socket.shutdown(socket.SHUT_RDWR)  # closed, it would stay open in processes forked from this one
        self._socket.close()
        self._process.wait()
        atexit.unregister(self.close)


class Server:
    """The server's side: one thread, which imports and forks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._exits: dict[int, tuple[int, int]] = {}
        """For each descriptor that tells the end of a rank: its process id, and the pipe for its exit code."""
        self._imported = set[str]()

    def serve(self) -> NoReturn:
        """Answer requests until the client has ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd in self._exits:
                        selector.unregister(key.fd)
                        self._reap(key.fd)
                    else:
                        selector.register(self._answer(), selectors.EVENT_READ)

    def _answer(self) -> int:
        """Fork one rank; returns the descriptor that tells its end. Ends this process at the end of the requests."""
        from fabric.launchers.process.os_process import exit_fd

        request, fds, _, _ = socket.recv_fds(self._connection, MAX_REQUEST_BYTES, 6)
        if not request:
            os._exit(0)
        sys.path[:], preload = pickle.loads(request)
        self._import(("fabric.launchers.rank.task", *preload))
        task_fd, report_fd, status_fd, *streams = fds
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(task_fd, report_fd, streams, parent)
        ended = exit_fd(pid)
        self._exits[ended] = pid, status_fd
        for fd in (task_fd, report_fd, *streams):
            os.close(fd)
        os.write(status_fd, NUMBER.pack(pid))
        return ended

    def _import(self, names: tuple[str, ...]) -> None:
        if self._imported.issuperset(names):
            return
        for name in names:
            import_module(name)
        self._imported.update(names)
        gc.collect()
        gc.freeze()  # ranks share the memory of what is imported, until they look at it

    def _become_rank(self, task_fd: int, report_fd: int, streams: list[int], parent: int) -> NoReturn:
        from fabric.launchers.process.interpreter import forget_parent
        from fabric.launchers.rank.task import run_task

        signal.signal(signal.SIGINT, signal.default_int_handler)
        forget_parent()  # torch has hundreds of finalizers, which take a rank 50 ms at its end
        self._connection.close()
        for ended, (_, status_fd) in self._exits.items():
            os.close(ended)
            os.close(status_fd)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        try:
            with open(task_fd, "rb") as file:
                sys.path[:] = pickle.load(file)
                run_task(file, report_fd, parent)
        finally:
            os._exit(1)

    def _reap(self, ended: int) -> None:
        """Report the exit code of a rank that has ended, and end the processes that it left."""
        from fabric.launchers.process.os_process import kill_group

        pid, status_fd = self._exits.pop(ended)
        os.close(ended)
        kill_group(pid, signal.SIGKILL)  # before it is reaped: then its number may be reused
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(status_fd, NUMBER.pack(code))
        os.close(status_fd)


if __name__ == "__main__":
    Server(socket.socket(fileno=int(sys.argv[1]))).serve()
