"""`fabric verify`: the numbers of one process, compared with those of a strategy on the user's own program."""

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from fabric.checks.verify_record import Step
from fabric.cli.run import options_of
from fabric.configure.run_options import program_of
from fabric.launchers.supervision.supervisor import ENDING
from fabric.verify.runs import Verdict, Verification, ranks_in_words, start_program


def verify(parsed: argparse.Namespace) -> int:
    """Run, compare, print. Returns 0 if the numbers are equal, 1 if not.

    Raises: ValueError: an option is wrong, there is no such script, or the program failed in a run.
    """
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    program = program_of(parsed.script, parsed.script_arguments, is_module=parsed.module)
    start, options = partial(start_program, os.environ, program), options_of(parsed)
    announce = partial(print, "fabric verify: the program runs", file=sys.stderr, flush=True)
    verification = Verification(start, options, parsed.steps, parsed.keep_dropout, parsed.tolerance, announce)
    verdict = verification.run(parsed.against, parsed.save)
    if parsed.json:
        print(json.dumps(as_json(verdict)))
    else:
        show(verdict, Console(highlight=False, markup=False))
    return 0 if verdict.is_equal else 1


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict and the table as plain data."""
    found = verdict.comparison and verdict.comparison.difference
    return {
        "equal": verdict.is_equal,
        "verdict": verdict.sentence,
        "causes": list(verdict.causes),
        "difference": found and asdict(found),
        "steps": [
            {"step": number, "reference": _numbers(one), "run": _numbers(other)}
            for number, (one, other) in enumerate(zip(verdict.reference.steps, verdict.run.steps, strict=False), 1)
        ],
    }


def show(verdict: Verdict, console: Console) -> None:
    """Print the table, the verdict, and the causes of a difference."""
    columns = [f"{each.strategy}, {ranks_in_words(each.num_ranks)}" for each in (verdict.reference, verdict.run)]
    table = Table("step", "", *columns, "difference")
    for step in as_json(verdict)["steps"]:
        rows = {words: (one, step["run"][words]) for words, one in step["reference"].items() if words in step["run"]}
        for place, (words, (one, other)) in enumerate(rows.items()):
            difference = "0" if one == other else f"{abs(one - other) / (abs(one) or 1.0):.1e}"
            table.add_row("" if place else str(step["step"]), words, f"{one:.8g}", f"{other:.8g}", difference)
    console.print(table)
    console.print(verdict.sentence, style="bold green" if verdict.is_equal else "bold red")
    if len(verdict.causes) > 1:
        console.print("Possible causes, the likeliest first:")
    for cause in verdict.causes:
        console.print(f"- {cause}")


def _end(number: int, frame: object) -> NoReturn:
    """End the run, and remove its record. A second Ctrl-C does not interrupt that."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _numbers(step: Step) -> dict[str, float]:
    """What was recorded for a step: without a backward only the learning rate."""
    numbers = {"sum of losses" if step.is_weighted else "loss": step.loss, "gradient norm": step.gradient_norm}
    rate = {"learning rate": step.learning_rates[0] if step.learning_rates else 0.0}
    return {**numbers, **rate} if step.gradients else rate
