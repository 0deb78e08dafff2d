"""Output of Python's fault handler as a traceback: most recent call last, with source lines, the main thread last.

The fault handler runs in a dying process and writes, for each thread, the most recent call first; the main thread comes
after all others.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Sequence

THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):$")
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
LIBRARY = sysconfig.get_path("stdlib")
EXTENSIONS = "Extension modules: "
FROM_A_LIBRARY = (
    "It came from a thread that runs no Python: one of gloo, NCCL, OpenMP or another library, which may have written "
    "why to stderr. gloo aborts if ranks make different calls: `fabric run --sanitize always` compares them before."
)


def readable(text: str, *, leave_out: Sequence[str]) -> str:
    """The stacks in `text`, without frames in files below the folders `leave_out` and the list of loaded libraries."""
    title, *lines = [line for line in text.splitlines() if not line.startswith(EXTENSIONS)]
    before: list[str] = []
    threads: list[tuple[str, list[str]]] = []
    for line in lines:
        if THREAD.match(line):
            threads.append((line, []))
        elif threads and line.startswith("  "):
            threads[-1][1].append(line)
        elif line:
            before.append(line)
    parts = ["\n".join([title, *before])]
    if threads and not any(header.startswith("Current") for header, _ in threads):
        parts.append(FROM_A_LIBRARY)
    num_idle = 0
    for number, (header, frames) in enumerate(threads, 1):
        who = "Main thread" if number == len(threads) else header.partition(" (")[0]
        shown = [words for frame in reversed(frames) for words in _frame(frame, leave_out)]
        if who.startswith("Thread") and all(_is_of_python(frame) for frame in frames):
            num_idle += 1
        elif shown:
            parts.append("\n".join([f"{who} (most recent call last):", *shown]))
    if num_idle:
        parts.insert(1, f"{num_idle} thread(s) in Python's own library, such as a queue's, are left out.")
    return "\n\n".join(parts)


def _is_of_python(line: str) -> bool:
    found = FRAME.match(line)
    return found is not None and found["file"].startswith(LIBRARY) and "site-packages" not in found["file"]


def _frame(line: str, leave_out: Sequence[str]) -> list[str]:
    found = FRAME.match(line)
    if found is None:
        return [line]
    if found["file"].startswith(tuple(leave_out)):
        return []
    source = linecache.getline(found["file"], int(found["line"])).strip() if found["line"].isdigit() else ""
    words = f'  File "{found["file"]}", line {found["line"]}, in {found["function"]}'
    return [words, f"    {source}"] if source else [words]
