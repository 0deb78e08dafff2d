"""A real browser without a network and without a window: `with browser(folder) as page: page.open(file)`.

Debian's `chromium-headless-shell` (`make browser` installs it), driven over a pipe by the DevTools protocol, so that
Python needs no package. Every host name is unknown to it; what a page asks for is in `Page.requests`.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, final

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
SECONDS = 30.0
"""How long an answer may take, on two cores that other tests use."""
PICTURES = Path(__file__).parents[2] / ".pytest_cache" / "pictures"
"""Where tests keep what they have seen; nothing deletes it."""


@final
class Page:
    """One tab. `errors`: exceptions of the page's scripts. `requests`: the addresses that it has asked for."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._numbers, self._unread = reader, writer, itertools.count(1), b""
        self._session: str | None = None
        self._has_loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(
        self,
        address: Path | str,
        *,
        width: int = 1200,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        media: Literal["screen", "print"] = "screen",
    ) -> None:
        """Load a file (or an address) in a window of this size, and return once its scripts have run."""
        self.errors, self.requests, self._has_loaded = [], [], False
        preference = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=preference)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=address if isinstance(address, str) else address.resolve().as_uri())
        while not self._has_loaded:
            self._take(self._next())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises: AssertionError: it throws."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self) -> str:
        """What a reader sees, without markup."""
        seen: str = self.run("document.body.innerText")
        return seen

    def picture(self, name: str) -> Path:
        """Keep a picture of the whole page as `PICTURES/name.png`, and return its path."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file = PICTURES / f"{name}.png"
        file.write_bytes(base64.b64decode(shot["data"]))
        return file

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol, and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._take(answer)

    def _take(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._has_loaded = True
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def _next(self) -> dict[str, Any]:
        ends = time.monotonic() + SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, ends - time.monotonic()))
            read = os.read(self._reader, 1 << 20) if ready else b""
            assert read, "the browser has ended" if ready else f"the browser did not answer in {SECONDS:g} s"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        return event


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Context: a browser of its own, whose files are in `folder`, with one page. No process outlives it."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert program is not None, f"no browser here (looked for {', '.join(PROGRAMS)}): `make browser` installs one"
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    options = [
        "--headless",
        "--no-sandbox",  # tests run as root
        "--remote-debugging-pipe",  # descriptors 3 and 4
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--hide-scrollbars",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'browser'}",
    ]
    shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
    with open(folder / "browser.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_in, ours_out)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
