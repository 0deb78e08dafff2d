"""A Python for launchers of others: write `*python()` where they are told to run `sys.executable`.

A rank that SLURM, mpirun, horovodrun or torchrun starts imports torch, for two seconds. This program takes 30 ms: it
asks the template of the tests (`tests/harness/template.py`) to fork the rank, with the environment, the streams, the
folder and the namespaces (`machines.py`) that the launcher gave. It passes signals on, and ends as the rank does.
The rank is no child of the launcher: where a test is about a launcher that kills ranks, or about what runs in a rank
beside the program, it starts real interpreters.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import Any

NAMESPACES = ("net", "uts", "mnt")
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

ENTER = """
import ctypes, os, sys
namespaces, folder, *program = sys.argv[1:]
for fd in map(int, filter(None, namespaces.split(","))):
    assert ctypes.CDLL(None, use_errno=True).setns(fd, 0) == 0, os.strerror(ctypes.get_errno())
    os.close(fd)
os.chdir(folder)
os.environ.pop("LD_LIBRARY_PATH", None)  # of mpirun, for libraries of MPI; those of a fork are loaded
os.execve(sys.executable, [sys.executable, *program], {**os.environ})
"""
"""What the fork does first: the template is on no machine. Only then it is the program."""


def python() -> tuple[str, ...]:
    """The words of a command, before a script or `-m` and a module."""
    import template

    template.run([sys.executable, "-c", ""], check=True)  # it answers others once it has imported torch
    return sys.executable, "-I", "-S", __file__, template.address()


def main(address: str, *program: str) -> int:
    """Run a program in a fork. Returns its exit code."""
    sys.path.append(str(Path(__file__).parents[1] / "harness"))
    import template

    own = [open_namespace(kind) for kind in NAMESPACES if is_another(kind, address)]
    if is_another("net", address):  # the name of the template's socket is one of its own network
        enter_network_of(address)
    template.adopt(address)
    words = [sys.executable, "-c", ENTER, ",".join(map(str, own)), os.getcwd(), *program]
    process = template.Popen(words, pass_fds=own, env={**os.environ, template.FORKS: "yes"})

    def pass_on(number: int, frame: Any) -> None:
        os.kill(process.pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def is_another(kind: str, address: str) -> bool:
    """Whether this process has another namespace than the template; on one machine it needs no rights."""
    return os.readlink(f"/proc/self/ns/{kind}") != os.readlink(f"/proc/{address}/ns/{kind}")


def open_namespace(kind: str) -> int:
    """A descriptor whose number the template does not use itself."""
    with open(f"/proc/self/ns/{kind}") as file:
        return fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 500)


def enter_network_of(address: str) -> None:
    import ctypes

    with open(f"/proc/{address}/ns/net") as network:
        assert ctypes.CDLL(None).setns(network.fileno(), 0) == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
