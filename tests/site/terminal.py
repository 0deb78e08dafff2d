"""`make pictures`: what a reader sees in a terminal, from real runs, as pictures in `docs/_static/terminal`.

The programs are those of the tutorial. Each runs on a pseudo-terminal, with its colours and bars.
"""

import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/_static/terminal"
COLUMNS = 110
WRONG = ROOT / "docs/tutorial/5-when-it-goes-wrong.md"


def block(page: Path, number: int) -> str:
    """The block of Python with this number in the page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[number]


PICTURES = {
    "progress": ("python train.py", block(ROOT / "docs/tutorial/2-two-processes.md", 0)),
    "sanitizer": ("python train.py", block(WRONG, 0)),
    "hang": ("python train.py", block(WRONG, 1)),
    "failure": ("python train.py", block(WRONG, 2)),
    "doctor": ("fabric doctor", ""),
}
"""The command that the picture shows, and the program that it runs."""


def seen(name: str, start: type[subprocess.Popen[bytes]] = subprocess.Popen) -> str:
    """What the command writes to a terminal, as one who sees it would read it: the last state of each line.

    `start`: starts the command."""
    command, program = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(program)
        by = {"python": [], "fabric": ["-m", "fabric"]}[command.split()[0]]
        text = screen(on_terminal([sys.executable, *by, *command.split()[1:]], folder, start))
    return text.replace(f"{folder}/", "").replace(f"{ROOT}/", "").replace("\n\n\n", "\n\n")


def on_terminal(words: list[str], folder: str, start: type[subprocess.Popen[bytes]]) -> str:
    """All that the command writes to a terminal of its own."""
    ours, theirs = pty.openpty()
    settings = {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    written = b""
    with start(
        words, cwd=folder, env={**os.environ, **settings}, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        while process.poll() is None or select.select([ours], [], [], 0.2)[0]:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    written += os.read(ours, 65536)
                except OSError:  # the terminal's other end is closed
                    break
        process.wait(timeout=60)
    os.close(ours)
    return written.decode(errors="replace")


def screen(written: str) -> str:
    """Lines as a terminal shows them: a carriage return begins the line anew, and a line may be erased."""
    lines = [""]
    for part in re.split(r"(\n|\r|\x1b\[\d*[AK]|\x1b\[2K|\x1b\[\?25[lh])", written):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            lines[-1] += "\r"
        elif re.fullmatch(r"\x1b\[\d*A", part):
            del lines[len(lines) - int(part[2:-1] or 1) :]
            lines = lines or [""]
        elif part and not part.startswith("\x1b[?25") and not re.fullmatch(r"\x1b\[\d*K", part):
            lines[-1] = lines[-1].rpartition("\r")[2] + part if lines[-1].endswith("\r") else lines[-1] + part
    return "\n".join(line.rstrip("\r") for line in lines).strip("\n") + "\n"


def picture(name: str, text: str) -> str:
    """An SVG without fonts from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(f"[bold]$ {PICTURES[name][0]}[/bold]", highlight=False)
    console.print(Text.from_ansi(text), highlight=False)
    form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    return console.export_svg(title="", code_format=form, unique_id=f"terminal-{name}")


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or PICTURES:
        text = seen(name)
        (FOLDER / f"{name}.svg").write_text(picture(name, text))
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
