"""Machines for a test: each has its own network, host name and `/etc/hosts`, and cables to a switch join them.

Linux namespaces stand for the machines; the file system and the user are shared, as on a cluster. Needs root,
iproute2 and util-linux; `why_not` says what is missing. Nothing of it is there once the `with` block has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine: a network namespace, and what makes a process in it believe in its name."""

    name: str
    address: str
    namespace: str
    hosts: Path
    """The `/etc/hosts` of all machines."""

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command on this machine; the process is the command itself, with no shell between."""
        become = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", become, str(self.hosts), self.name, *map(str, command)]
        return subprocess.Popen(["nsenter", f"--net=/run/netns/{self.namespace}", *inside], text=True, **options)

    def run(
        self, *command: str | Path, timeout_seconds: float = 110, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine to its end."""
        with self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
            try:
                output, errors = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired as late:
                process.kill()
                output, errors = process.communicate()
                raise AssertionError(
                    f"{command} has not ended after {timeout_seconds:g} s.\n{output}\n{errors}"
                ) from late
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def why_not(*programs: str) -> str | None:
    """What this machine lacks to be several; None where it can. `programs`: what else has to be installed."""
    if os.geteuid() != 0:
        return "machines are made of network namespaces, which only root can make"
    missing = [program for program in ("ip", "nsenter", "unshare", *programs) if shutil.which(program) is None]
    return f"needs {', '.join(missing)}, not installed here" if missing else None


@contextlib.contextmanager
def machines(names: Sequence[str], folder: Path) -> Iterator[tuple[Machine, ...]]:
    """One machine for each name, on one network. `folder` holds their `/etc/hosts`."""
    prefix, hosts = f"fabric{os.getpid()}", folder / "hosts"
    made = tuple(
        Machine(name=name, address=f"10.78.0.{number}", namespace=f"{prefix}-{number}", hosts=hosts)
        for number, name in enumerate(names, 1)
    )
    switch = f"{prefix}-switch"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{one.address} {one.name}\n" for one in made))
    with contextlib.ExitStack() as stack:
        for namespace in (switch, *(one.namespace for one in made)):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)
        _ip("-n", switch, "link", "add", "switch0", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch0", "up")
        for number, one in enumerate(made):
            _ip("-n", one.namespace, "link", "add", "cable0", "type", "veth", "peer", f"port{number}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{number}", "master", "switch0", "up")
            _ip("-n", one.namespace, "addr", "add", f"{one.address}/24", "dev", "cable0")
            for link in ("lo", "cable0"):
                _ip("-n", one.namespace, "link", "set", link, "up")
        yield made


def ssh(among: Sequence[Machine], folder: Path) -> Path:
    """A program `ssh` in `folder`: it runs a command on the machine that it is told, which hears nothing of ours.

    A stand-in for launchers that reach other machines by ssh. Options may stand before the machine's name and after it.
    """
    names = "".join(f"{one.name}) net=/run/netns/{one.namespace} ;;\n" for one in among)
    program = folder / "ssh"
    program.write_text(_SSH.format(names=names, hosts=among[0].hosts))
    program.chmod(0o755)
    return program


_SSH = """#!/bin/sh
name=
while :; do
    case "$1" in
        -[iop]) shift 2 ;;
        -*) shift ;;
        *) [ -z "$name" ] || break; name=$1; shift ;;
    esac
done
case "$name" in
{names}*) echo "there is no machine $name" >&2; exit 255 ;;
esac
become='mount --bind "$0" /etc/hosts && hostname "$1" && exec sh -c "$2"'
exec env -i HOME="$HOME" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    nsenter --net="$net" unshare --uts --mount sh -c "$become" '{hosts}' "$name" "$*"
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
