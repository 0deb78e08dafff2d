"""Start Python programs as forks of one process that has imported torch and fabric: 0.03 s of CPU each, not 4 s.

`Popen` and `run` are those of `subprocess`, for programs of `sys.executable`. A command, a script, a module or a text
from stdin is forked from the template; anything else (Python's own options, variables that Python or a library reads at
its start, another copy of fabric, a terminal) is a fresh interpreter, and so is what a test calls `fresh`: one that is
about what a program imports, or about destructors at its end, which do not run in a fork.

The fork runs its program in a new `__main__`, with its own environment, arguments, import path and standard streams.
What it keeps of the template: imported modules, and the command line in /proc. The environment that /proc shows of it
says which test it belongs to, because the mark is written over a place that was reserved for it.
The template computes nothing, so that its forks can compute, and can fork ranks. A fork server that a program starts
for its ranks is forked from the template as well. Tests that launch ranks from their own process start a real one.
With `FORKS` in its environment, so are all programs that it starts, and one that it becomes by `execve` runs in the
same process, also on a terminal: for tests that are about neither `preexec_fn` nor the hash seed, which a fork cannot
have.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from typing import Any, NoReturn

MARK = "FABRIC_TEST_MARK"
FORKS = "FABRIC_TEST_FORKS"
NO_MARK = "0" * 32
ADDRESS = "\0fabric-template-{}"
NUMBER = struct.Struct("!i")
MAX_REQUEST_BYTES = 1 << 18
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "fabric.fabric",
    "fabric.checkpoints.checkpoints",
    "fabric.launchers.choose",
    "fabric.launchers.watch.watcher",
    "fabric.strategies.data.loaders",
    "fabric.strategies.ddp.strategy",
)
OF_LAUNCHERS = os.sep + "launchers" + os.sep
FORK_SERVER = os.path.join("launchers", "supervision", "fork_server.py")
READ_AT_START = ("COVERAGE", "CUDA", "GOMP_", "JEMALLOC", "KMP_", "LD_", "MALLOC", "MKL_", "OPENBLAS_", "TORCH_")
"""Prefixes of variables which libraries read when they are loaded: a program that gets another value is not forked."""
ALLOWED_WITH_FORKS = ("PYTHONHASHSEED", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""But for these with `FORKS`, which change nothing in a test: `fabric verify` and torchrun set them."""


class Other:
    """The template of another process: what this program was forked from, or what workers of pytest-xdist share."""

    def __init__(self, address: str, environ: dict[str, str]) -> None:
        self.address, self.environ = address, environ

    def start(self, call: dict[str, Any], streams: list[int], kept: tuple[int, ...]) -> tuple[int, int]:
        """Fork one program. Its process id, and a pipe that tells how it ended."""
        import pickle

        reader, writer = os.pipe()
        with os.fdopen(writer, "wb"), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(ADDRESS.format(self.address))
            socket.send_fds(connection, [pickle.dumps({**call, "kept": kept})], [writer, *streams, *kept])
            answer = connection.recv(NUMBER.size)
        assert answer, "the template has ended"
        return NUMBER.unpack(answer)[0], reader


class Template(Other):
    """The template that this process has started."""

    def __init__(self) -> None:
        self._socket, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {name: value for name, value in os.environ.items() if name not in (MARK, "PYTHONPATH")}
        super().__init__(str(os.getpid()), environ)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(ADDRESS.format(self.address))
        listener.listen()  # others may ask already: they wait until it has imported
        with server, listener:
            fds = server.fileno(), listener.fileno()
            self.process = subprocess.Popen(
                [sys.executable, __file__, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**self.environ, MARK: NO_MARK},
            )

    def close(self) -> None:
        """End it. A program that it started goes on."""
        self._socket.close()
        self.process.wait()


_templates: list[Other] = []
_shared: list[str] = []
"""The address of the template that this process shares with others."""
running: set[int] = set()
"""Programs that the template has started, and that were not waited for."""


def template() -> Other:
    """The template of this process. Its first program has variables that imports set, as scikit-learn's `KMP_` ones."""
    if not _templates:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        _templates.append(Other(_shared[0], environ) if _shared else Template())
    return _templates[0]


def end() -> None:
    """End the template of this process, if there is one."""
    while _templates:
        one = _templates.pop()
        if isinstance(one, Template):
            one.close()


def address() -> str:
    """What another process needs for `share` or `adopt`."""
    return template().address


def share(address: str) -> None:
    """In a worker of pytest-xdist: have the template of the process that started it, and of the others."""
    _shared[:] = [address]


def adopt(address: str) -> None:
    """In a fresh interpreter: fork its fork server from the template, which has imported what that would import."""
    _templates[:] = [Other(address, dict(os.environ))]
    subprocess.Popen = PopenOfPrograms  # type: ignore[misc]


class Popen(subprocess.Popen[Any]):
    """A Python program that the template forks, where it can; a fresh interpreter where it cannot."""

    _status_fd = -1

    def __init__(self, arguments: list[str], *more: Any, fresh: bool = False, **options: Any) -> None:
        self._forked = not fresh and _can_be_forked(arguments, options)
        super().__init__(arguments, *more, **options)

    def _execute_child(self, *call: Any) -> None:
        if not self._forked:
            super()._execute_child(*call)
            return
        args, pass_fds, cwd, env, pipes, new_session = call[0], *call[4:7], call[10:16], call[21]
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        words = {
            "argv": [os.fspath(word) for word in args],
            "environ": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "new_session": new_session,
        }
        self.pid, self._status_fd = template().start(words, streams, tuple(pass_fds))
        running.add(self.pid)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self._forked:
            return super()._try_wait(wait_flags)
        with selectors.DefaultSelector() as selector:
            selector.register(self._status_fd, selectors.EVENT_READ)
            if not selector.select(0 if wait_flags & os.WNOHANG else None):
                return 0, 0
        status = os.read(self._status_fd, NUMBER.size)
        os.close(self._status_fd)
        running.discard(self.pid)
        return self.pid, NUMBER.unpack(status)[0] if status else signal.SIGKILL

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if not self._forked:
            return super()._internal_poll(*args, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class PopenOfPrograms(Popen):
    """What a forked program has for `subprocess.Popen`: its fork server is forked, and so is its own file, if it starts
    that again, and with `FORKS` any program but the ranks and the guardian of a launch. All else is as it was."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        words = [*map(str, args)] if isinstance(args, (list, tuple)) and len(args) > 1 else [""] * 2
        is_fork_server = len(words) == 3 and words[1].endswith(FORK_SERVER)
        is_own_file = words[1] == vars(sys.modules["__main__"]).get("__file__")
        is_program = FORKS in os.environ and bool(words[1]) and OF_LAUNCHERS not in words[1]
        if is_program and words[1] == "-u":  # of torchrun
            args = [words[0], *words[2:]]
        forked = (is_fork_server or is_own_file or is_program) and all(map(_is_open, range(3)))
        super().__init__(args, *more, fresh=not forked, **options)


class Replaced(BaseException):
    """A forked program calls `execve`, to become this one."""

    def __init__(self, argv: list[str], environ: dict[str, str]) -> None:
        self.argv, self.environ = argv, environ


def _execve(path: str, argv: list[str], environ: dict[str, str]) -> NoReturn:
    if _can_be_forked(argv, {"env": environ}):
        raise Replaced(argv, environ)
    _real_execve(path, argv, environ)


_real_execve = os.execve


def _is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False


def run(
    arguments: list[str],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`; `fresh` is among the options."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(arguments, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, stdout, stderr)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def _can_be_forked(arguments: list[str], options: dict[str, Any]) -> bool:
    given = options.get("env")
    environ = dict(os.environ if given is None else given)
    started = template().environ
    changed = {name for name in {*environ, *started} if environ.get(name) != started.get(name)}
    same = {"PYTHONPATH", *(ALLOWED_WITH_FORKS if FORKS in environ else ())}
    streams = [options.get(name) for name in ("stdin", "stdout", "stderr")]
    return (
        sys.platform == "linux"
        and os.fspath(arguments[0]) == sys.executable
        and len(arguments) > 1
        and (str(arguments[1]) in ("-", "-c", "-m") or not str(arguments[1]).startswith("-"))
        and not any(name.startswith((*READ_AT_START, "PYTHON")) for name in changed - same)
        and not any(os.path.exists(os.path.join(path, "fabric")) for path in _import_path(environ))
        and (FORKS in environ or not any(map(_is_terminal, range(3), streams)))
    )


def _is_terminal(fd: int, stream: Any) -> bool:
    return os.isatty(fd) if stream is None else isinstance(stream, int) and stream >= 0 and os.isatty(stream)


def _import_path(environ: dict[str, str]) -> list[str]:
    return [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class Server:
    """The template's side: one thread, which forks. `serve` returns in the forks only."""

    def __init__(self, connection: socket.socket, listener: socket.socket) -> None:
        self._connection, self._listener = connection, listener
        self.address = listener.getsockname().decode().removeprefix(ADDRESS.format(""))
        self._statuses: dict[int, int] = {}
        self._wake, self._woken = os.pipe()
        for fd in (self._wake, self._woken):
            os.set_blocking(fd, False)
        self._path = sys.path[1:]

    def serve(self) -> dict[str, Any]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            call = None
            while call is None:
                ready = [key.fd for key, _ in selector.select()]
                if self._wake in ready:
                    self._reap()
                if self._connection.fileno() in ready:
                    os._exit(0)  # the tests have ended
                if self._listener.fileno() in ready:
                    with self._listener.accept()[0] as connection:
                        call = self._answer(connection)
        self._close()
        return call

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        """In the fork, its call. Nothing comes from a program that asks and dies."""
        import pickle

        request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 64)
        if not request:
            return None
        pid = os.fork()
        if pid == 0:
            call: dict[str, Any] = pickle.loads(request)
            os.close(fds.pop(0))
            connection.close()
            self._take(call, fds)
            return call
        self._statuses[pid] = fds.pop(0)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            connection.send(NUMBER.pack(pid))
        return None

    def _take(self, call: dict[str, Any], fds: list[int]) -> None:
        """Standard streams, descriptors under their own numbers, folder, environment, session."""
        self._close()
        high = 1000
        fds = [_moved(fd, high) for fd in fds]
        for number, fd in zip((0, 1, 2, *call["kept"]), fds, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if call["new_session"]:
            os.setsid()
        os.chdir(call["cwd"])
        os.environ.clear()
        os.environ.update(call["environ"])
        sys.path[:] = _import_path(call["environ"]) + self._path

    def _close(self) -> None:
        if self._connection.fileno() == -1:
            return
        signal.set_wakeup_fd(-1)
        for fd in (self._wake, self._woken, *self._statuses.values()):
            os.close(fd)
        self._connection.close()
        self._listener.close()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while self._statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            fd = self._statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(fd, NUMBER.pack(status))
            os.close(fd)


def _moved(fd: int, least: int) -> int:
    """The same file under a number that is out of the way."""
    import fcntl

    high = fcntl.fcntl(fd, fcntl.F_DUPFD, least)
    os.close(fd)
    return high


def _follow(call: dict[str, Any]) -> None:
    """Run a program as Python would have, in a new `__main__`."""
    import runpy
    import types
    from functools import partial

    _set_num_threads(call["environ"].get("OMP_NUM_THREADS"))
    first, *rest = call["argv"][1:]
    path = list(sys.path)
    sys.orig_argv[:] = call["argv"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as `import multiprocessing` has it
    vars(main).update(__builtins__=__builtins__, __spec__=None, __annotations__={})
    if first == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        sys.path.insert(0, call["cwd"])
        body = partial(runpy._run_module_as_main, rest[0])
    else:
        if first in ("-", "-c"):
            text, *arguments = rest if first == "-c" else (sys.stdin.read(), *rest)
            code = compile(text, "<string>" if first == "-c" else "<stdin>", "exec", dont_inherit=True)
            sys.argv[:], folder = [first, *arguments], ""
        else:
            sys.argv[:], folder = [first, *rest], os.path.dirname(os.path.realpath(first))
            with open(first, "rb") as source:
                code = compile(source.read(), os.path.abspath(first), "exec", dont_inherit=True)
            vars(main)["__file__"] = os.path.abspath(first)
        sys.path.insert(0, folder)
        body = partial(exec, code, vars(main))
    code, other = 0, {}
    try:
        body()
    except Replaced as replaced:
        other = {"argv": replaced.argv, "environ": replaced.environ}
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code == 1 and error.code != 1:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        traceback = error.__traceback__
        traceback = traceback.tb_next if traceback is not None else None  # the program's own lines
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        code = 1
    if other:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(other["environ"])
        _follow({**call, **other})
    _end(code)


def _end(code: int) -> NoReturn:
    """As Python does at its exit, but for destructors: those of all modules take a fork 0.3 s."""
    from fabric.launchers.process import interpreter

    try:
        interpreter.join_threads()
        interpreter.run_exit_functions()
        interpreter.close_files()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        code = code or 120  # as Python says that a stream could not be flushed
    os._exit(code & 0xFF)


def _set_num_threads(number: str | None) -> None:
    """OpenMP has read its variable when torch was imported, for another program."""
    if number is not None and number != _started_with:
        import torch

        torch.set_num_threads(int(number))


def _end_by_interrupt() -> NoReturn:
    """As Python does after Ctrl-C: exit functions run, and the exit code says that it was a signal."""
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def _address_of_mark() -> int:
    """Where this process began with its mark: what /proc shows of its environment, and of that of its forks."""
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address = getenv(MARK.encode())
    assert ctypes.string_at(address, len(NO_MARK)) == NO_MARK.encode()
    return int(address)


def _write_mark(address: int, mark: str) -> None:
    import ctypes

    ctypes.memmove(address, mark.encode(), len(NO_MARK))


if __name__ == "__main__":
    import gc
    import weakref
    from importlib import import_module

    _started_with = os.environ.get("OMP_NUM_THREADS")
    _address = _address_of_mark()
    for _name in PRELOAD:
        import_module(_name)
    for _finalizer in list(vars(weakref.finalize)["_registry"]):  # of modules: they take a fork 50 ms at its end
        _finalizer.atexit = False
    gc.collect()
    gc.freeze()
    _server = Server(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
    _call = _server.serve()
    _templates[:] = [Other(_server.address, _call["environ"])]
    subprocess.Popen = PopenOfPrograms  # type: ignore[misc]
    if FORKS in _call["environ"]:
        os.execve = _execve
    if len(_call["environ"].get(MARK, "")) == len(NO_MARK):
        _write_mark(_address, _call["environ"][MARK])
    _follow(_call)
