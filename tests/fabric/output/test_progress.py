from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from fabric import Fabric
from fabric.output.progress import _line, progress

HIDE_CURSOR, SHOW_CURSOR, UP = "\x1b[?25l", "\x1b[?25h", "\x1b[1A"


def piped(width: int = 100) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width), file


def on_terminal(body: Callable[[Console], object]) -> str:
    """All that `body` wrote to a terminal."""
    master, slave = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(master, 4096):
                seen.append(chunk)
        except OSError:  # how Linux says that the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(slave, "w") as terminal:
            body(Console(file=terminal, width=100, _environ={"TERM": "xterm"}))
    finally:
        reader.join(10)
        os.close(master)
    return b"".join(seen).decode()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# How fast


def test_rates_are_those_of_all_ranks_and_the_time_left_follows() -> None:
    now = 0.0
    bars = Progress(get_time=lambda: now, disable=True)
    task = bars.add_task("", total=100)
    assert _line(bars.tasks[0], 0, 4) == "0/100  0.00 it/s  0:00:00"
    now = 5.0
    bars.update(task, completed=10)
    now = 15.0
    bars.update(task, completed=30)
    assert _line(bars.tasks[0], 0, 4) == "30/100  2.00 it/s  0:00:15  0:00:35 left"
    assert _line(bars.tasks[0], 30 * 32, 4) == "30/100  256 samples/s  0:00:15  0:00:35 left"


def test_before_the_second_update_the_rate_is_that_since_the_start() -> None:
    now = 0.0
    bars = Progress(get_time=lambda: now, disable=True)
    task, now = bars.add_task("", total=None), 4.0
    bars.update(task, completed=2)
    assert _line(bars.tasks[0], 0, 1) == "2  0.50 it/s  0:00:04"


# What is shown


def test_without_a_terminal_a_plain_line_is_printed_at_the_end() -> None:
    console, file = piped()
    batches = [(torch.zeros(8, 3), torch.zeros(8))] * 5
    assert list(progress(batches, "epoch [red] 0", num_ranks=2, console=console)) == batches
    assert re.fullmatch(r"epoch \[red\] 0: 5/5  [\d,.]+ samples/s  0:00:\d\d\n", file.getvalue())


def test_a_loop_left_early_prints_how_far_it_came() -> None:
    console, file = piped()
    for number in progress(range(10), console=console):
        if number == 3:
            break
    assert re.fullmatch(r"3/10  [\d,.]+ it/s  0:00:\d\d(  [\d:]+ left)?\n", file.getvalue())


@pytest.mark.parametrize(
    ("item", "samples"),
    [
        (torch.zeros(6, 2), 6),
        ({"name": "a", "image": [torch.zeros(6)]}, 6),
        ((None, torch.zeros(3, 1), torch.zeros(9)), 3),
        ("text", 0),
        (torch.tensor(1.0), 0),
    ],
    ids=["tensor", "nest", "tuple", "text", "scalar"],
)
def test_samples_are_the_first_dim_of_the_first_tensor(item: Any, samples: int) -> None:
    from fabric.output.progress import first_dim

    assert first_dim(item) == samples


def test_an_iterable_without_a_length_shows_no_total() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

        def __len__(self) -> int:
            raise TypeError("no length")

    console, file = piped()
    assert list(progress(Unsized(), console=console)) == [1, 2]
    assert file.getvalue().startswith("2  ")
    assert list(progress((n for n in range(2)), total=2, console=console)) == [0, 1]
    assert file.getvalue().splitlines()[1].startswith("2/2  ")


def test_if_disabled_the_iterator_is_that_of_the_iterable() -> None:
    console, file = piped()
    assert type(progress([1, 2], enabled=False, console=console)) is type(iter([]))
    assert file.getvalue() == ""


# On a terminal


def test_a_bar_on_a_terminal_ends_full_and_restores_the_cursor() -> None:
    text = on_terminal(lambda console: list(progress([torch.zeros(4)] * 6, "learning", console=console)))
    assert "━" in text
    assert re.search(r"learning ━+ 6/6  [\d,.]+ samples/s", plain(text))
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1


def test_a_printed_line_appears_whole_above_the_bar() -> None:
    def body(console: Console) -> None:
        for number in progress(range(3), "bar", console=console):
            print(f"line {number}", "[not markup]")

    lines = plain(on_terminal(body)).replace("\r", "\n").splitlines()
    assert [line.strip() for line in lines if "line" in line] == [f"line {n} [not markup]" for n in range(3)]


@pytest.mark.parametrize("how", ["break", "raise"])
def test_leaving_the_loop_restores_terminal_and_output(how: str) -> None:
    stdout = sys.stdout

    def body(console: Console) -> None:
        try:
            for number in progress(range(10), console=console):
                if number == 2 and how == "break":
                    break
                if number == 2:
                    raise KeyError(number)
        except KeyError:
            pass

    text = on_terminal(body)
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.rstrip("\r\n").endswith(SHOW_CURSOR)
    assert sys.stdout is stdout


def test_a_bar_may_run_within_another() -> None:
    def body(console: Console) -> None:
        for epoch in progress(range(2), "epochs", console=console):
            list(progress(range(4), f"epoch {epoch}", console=console))

    text = plain(on_terminal(body))
    assert re.search(r"epoch 1 ━+ 4/4", text)
    assert re.search(r"epochs ━+ 2/2", text)


@pytest.mark.slow
def test_an_iterator_kept_until_exit_restores_the_cursor() -> None:
    master, slave = pty.openpty()
    program = "from fabric.output.progress import progress\nheld = progress(range(3), 'held')\nnext(held)\n"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", program], stdout=slave, env=environment, check=True, timeout=60)
    os.close(slave)
    seen = b""
    try:
        while chunk := os.read(master, 4096):
            seen += chunk
    except OSError:
        pass
    os.close(master)
    assert seen.decode().count(HIDE_CURSOR) == seen.decode().count(SHOW_CURSOR) == 1


# Printing


def test_only_rank_zero_prints_and_as_print_does(capsys: pytest.CaptureFixture[str]) -> None:
    Fabric(accelerator="cpu", devices=1).print("a", [1, 2], "[red]b[/red]", sep="-", end="!\n")
    assert capsys.readouterr().out == "a-[1, 2]-[red]b[/red]!\n"


class Writes(io.StringIO):
    """Keeps each text that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts += [text] if text else []
        return super().write(text)


def test_several_values_are_one_write() -> None:
    file = Writes()
    Fabric(accelerator="cpu", devices=1).print("loss", 0.5, [1], file=file, flush=True)
    assert file.texts == ["loss 0.5 [1]\n"]
