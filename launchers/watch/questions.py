"""Questions between processes, outside of any process group: one TCP connection for each question.

Each rank listens on a port. A client connects, sends the rank's token and a question in one line, and reads the answer
until the connection is closed. A process that is stopped, or whose GIL is held, accepts the connection (the kernel
does) and does not answer; one that has ended refuses it. Both tell the client something.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

AT_ONCE = 200
"""How many processes are asked at the same time. Each needs one of often at most 1024 open descriptors."""
LINE_BYTES = 1 << 16
LINE_SECONDS = 2.0
"""How long a client may take to send its question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address of a rank's watcher."""

    rank: int
    host: str
    """Name of the machine: equal for ranks of one node."""
    address: str
    port: int
    pid: int
    token: str
    """Sent with each question: anyone can connect to a port, but only ranks of the job get answers."""

    def to_bytes(self) -> bytes:
        """Serialize."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Place:
        """Deserialize."""
        return cls(**json.loads(content))


Silence = Literal["silent", "refused", "unreachable"]


def ask_all(places: Sequence[Place], question: str, seconds: float) -> dict[int, bytes | Silence]:
    """The answer of each rank. "silent": none within `seconds`; "refused": the process no longer listens;
    "unreachable": no connection to its machine."""
    answers: dict[int, bytes | Silence] = {}
    for start in range(0, len(places), AT_ONCE):
        answers.update(_ask_some(places[start : start + AT_ONCE], question, time.monotonic() + seconds))
    return answers


def _ask_some(places: Sequence[Place], question: str, deadline: float) -> Iterator[tuple[int, bytes | Silence]]:
    with selectors.DefaultSelector() as selector:
        heard: dict[int, bytearray] = {}
        for place in places:
            family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            if connection.connect_ex((place.address, place.port)) not in (0, errno.EINPROGRESS):
                connection.close()
                yield place.rank, "unreachable"
                continue
            selector.register(connection, selectors.EVENT_WRITE, place)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chosen, place = key.fileobj, key.data
                assert isinstance(chosen, socket.socket)
                try:
                    if place.rank not in heard:
                        raise_error_of(chosen)
                        chosen.sendall(f"{place.token} {question}\n".encode())
                        heard[place.rank] = bytearray()
                        selector.modify(chosen, selectors.EVENT_READ, place)
                        continue
                    data = chosen.recv(1 << 16)
                except OSError as error:
                    selector.unregister(chosen)
                    chosen.close()
                    yield place.rank, "refused" if isinstance(error, ConnectionError) else "unreachable"
                    continue
                heard[place.rank] += data
                if not data:
                    selector.unregister(chosen)
                    chosen.close()
                    yield place.rank, bytes(heard[place.rank]) or "refused"
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
            yield key.data.rank, "silent" if key.data.rank in heard else "unreachable"


def raise_error_of(connection: socket.socket) -> None:
    """Raise the error with which a connection ended that was made in the background."""
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def is_reachable(address: str, port: int, seconds: float) -> bool:
    """Whether the machine answers, be it that nothing listens on the port."""
    try:
        socket.create_connection((address, port), seconds).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return True


class Listener:
    """A port on which questions are answered, each in a thread, since an answer may need other ranks."""

    def __init__(self, address: str, token: str, answer: Callable[[str], bytes]) -> None:
        self._token, self._answer = token, answer
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=4096)
        self._address = address or "127.0.0.1"
        self._is_closing = False

    @property
    def port(self) -> int:
        """The port, chosen by the operating system."""
        return int(self._socket.getsockname()[1])

    def turn(self, seconds: float) -> bool:
        """Wait for a question for at most that long, and answer it in another thread. False: the port is closed."""
        self._socket.settimeout(seconds)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return not self._shut_if_closing()
        except OSError:
            return False
        if self._shut_if_closing():
            connection.close()
            return False
        try:
            connection.settimeout(LINE_SECONDS)
            token, _, question = connection.makefile("rb").readline(LINE_BYTES).decode().rstrip("\n").partition(" ")
        except (OSError, ValueError):  # the client has gone, or is no rank of this job
            connection.close()
            return True
        if token != self._token:
            connection.close()
            return True
        threading.Thread(
            target=self._reply, args=(connection, question), daemon=True, name="fabric-watch-reply"
        ).start()
        return True

    def close(self) -> None:
        """Make a `turn` that is waiting close the port and return; if it cannot be woken up, after its time."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            socket.create_connection((self._address, self.port), LINE_SECONDS).close()

    def _shut_if_closing(self) -> bool:
        if self._is_closing:
            self.shut()
        return self._is_closing

    def shut(self) -> None:
        """Close the port if no `turn` is waiting."""
        self._socket.close()

    def _reply(self, connection: socket.socket, question: str) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(self._answer(question))
