"""Questions between processes, outside of any process group: one TCP connection for each question.

Each rank listens on a port. A client connects, sends the rank's token and a question in one line, and reads the answer
until the connection is closed. A process that is stopped, or whose GIL is held, accepts the connection (the kernel
does) and does not answer; one that has ended refuses it. Both tell the client something.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

AT_ONCE = 200
"""How many processes are asked at the same time, each by a thread."""
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
    def from_bytes(cls, content: bytes) -> "Place":
        """Deserialize."""
        return cls(**json.loads(content))


Silence = Literal["silent", "refused", "unreachable"]


def ask_all(places: Sequence[Place], question: str, seconds: float) -> dict[int, bytes | Silence]:
    """The answer of each rank. "silent": none within `seconds`; "refused": the process no longer listens;
    "unreachable": no connection to its machine."""
    if not places:
        return {}
    with ThreadPoolExecutor(min(len(places), AT_ONCE)) as threads:
        answers = threads.map(lambda place: _ask(place, question, seconds), places)
        return {place.rank: answer for place, answer in zip(places, answers, strict=True)}


def _ask(place: Place, question: str, seconds: float) -> bytes | Silence:
    answer, is_connected = bytearray(), False
    try:
        with socket.create_connection((place.address, place.port), seconds) as connection:
            is_connected = True
            connection.sendall(f"{place.token} {question}\n".encode())
            while data := connection.recv(1 << 16):
                answer += data
    except ConnectionError:
        return "refused"
    except OSError:
        return "silent" if is_connected else "unreachable"
    return bytes(answer) or "refused"


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
        connection = None
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            pass
        except OSError:
            return False
        if self._is_closing:
            self._socket.close()
        if connection is not None:
            threading.Thread(target=self._reply, args=(connection,), daemon=True, name="fabric-watch-reply").start()
        return not self._is_closing

    def close(self) -> None:
        """Make a `turn` that is waiting close the port and return; if it cannot be woken up, after its time."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            socket.create_connection((self._address, self.port), LINE_SECONDS).close()

    def _reply(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, UnicodeDecodeError):  # a client that has gone, or is no rank
            connection.settimeout(LINE_SECONDS)
            line = connection.makefile("rb").readline(LINE_BYTES).decode()
            token, _, question = line.rstrip("\n").partition(" ")
            if token == self._token:
                connection.sendall(self._answer(question))
