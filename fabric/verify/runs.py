"""Runs a program as asked, and in one process, and compares: the implementation of `fabric verify`.

Each run is a process of its own, started like `fabric run`; a record is all that comes back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from fabric.checks.record import Record, Recording
from fabric.checks.recorder import Recorder
from fabric.configure.run_options import ProgramId, as_variable
from fabric.strategies.data.rng import preserved_rngs
from fabric.verify.causes import causes, causes_of_chaos, factor_in_words
from fabric.verify.comparison import Comparison, compare, why_nothing

REFERENCE: Mapping[str, str] = {"strategy": "single_device", "devices": "1", "num_nodes": "1", "launcher": "auto"}


class ProgramError(RuntimeError):
    """The program failed before it had a record; the message has its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of `verify`."""

    is_equal: bool
    """Whether the run has the numbers of the reference."""
    sentence: str
    causes: Sequence[str]
    """What may explain a difference, the likeliest first."""
    reference: Record
    run: Record
    comparison: Comparison | None = None
    """None: nothing was compared."""


Options: TypeAlias = Mapping[str, Any]
Start: TypeAlias = Callable[[Options, Recording], tuple[int, str]]
"""Runs the program with these options of `Fabric`, recorded. Returns its exit code and its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How often and in which way a program is run."""

    start: Start
    options: Options
    num_steps: int = 8
    keeps_dropout: bool = False
    tolerance: float | None = None

    def run(self, against: str | None = None, save: str | None = None) -> Verdict:
        """Run the program, and compare. `against`: a saved record, or a strategy; None: one process. `save`: a file for
        the record. Raises: ProgramError: the program failed. ValueError: a record is damaged, or of another model."""
        known = Record.load(Path(against)) if against is not None and _is_file(against) else None
        with tempfile.TemporaryDirectory(prefix="fabric-verify-") as name:
            record = partial(self._record, Path(name) / "record")
            run = record("as asked", {"sanitize": "always", **self.options})
            if save is not None:
                run.save(Path(save))
            if known is not None:
                _refuse_other_model(known, run, str(against))
                return judge(known, None, run, self.tolerance)
            options = self._options("accelerator", "precision")
            if against is not None:
                others = {**options, **self._options("devices", "num_nodes"), "strategy": against}
                return judge(record(f"under {against}", others), None, run, self.tolerance)
            one = {**options, **REFERENCE}
            reference = record("in one process", one, in_place_of=run.num_shares)
            permuted = record("in one process, permuted", one, in_place_of=run.num_shares, permuted=True)
        return judge(reference, permuted, run, self.tolerance)

    def _record(self, path: Path, words: str, options: Options, **recorded: Any) -> Record:
        recording = Recording(path=str(path), num_steps=self.num_steps, keeps_dropout=self.keeps_dropout, **recorded)
        code, said = self.start(options, recording)
        if path.exists():
            record = Record.load(path)
            path.unlink()
            return record
        if code:
            raise ProgramError(f"The program failed {words}, with exit code {code}:\n{said}")
        raise ProgramError(
            f"The program ended {words} without a record: it launches no `Fabric`, or leaves before `fabric.close()`. "
            f"It printed:\n{said}"
        )

    def _options(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in names}


def start_program(
    environ: Mapping[str, str], program: ProgramId, options: Options, recording: Recording
) -> tuple[int, str]:
    """Run a program as `fabric run` does, in a process of its own."""
    words = {name: str(value) for name, value in options.items()}
    ended = subprocess.run(
        [sys.executable, *program.arguments],
        env={"PYTHONHASHSEED": "0", **environ, **as_variable({**words, "record": recording.as_option()}, program)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return ended.returncode, ended.stdout.decode(errors="replace").strip()


def start_function(
    function: Callable[..., object], args: Sequence[object], options: Options, recording: Recording
) -> tuple[int, str]:
    """Launch a function; the generators of this process stay as they are."""
    from fabric.fabric import Fabric

    numbers: dict[str, Any] = {
        name: int(value) if name in ("devices", "num_nodes") else value for name, value in options.items()
    }
    with preserved_rngs():
        recorder = Recorder(recording, str(options["strategy"]))
        Fabric(**numbers, plugins=[recorder]).launch(_run, function, args)
    return 0, ""


def _run(fabric: Any, function: Callable[..., object], args: Sequence[object]) -> None:
    with suppress(SystemExit):  # of the recorder, after the last step
        function(fabric, *args)


def judge(reference: Record, permuted: Record | None, run: Record, tolerance: float | None) -> Verdict:
    """Compare the records, and say in one sentence what was found."""
    for record, words in ((run, "as asked"), (reference, "in the reference")):
        reason = why_nothing(record)
        if reason is not None:
            sentence = f"Nothing was compared: {words}, {reason}."
            return Verdict(is_equal=False, sentence=sentence, causes=(), reference=reference, run=run)
    found = compare(reference, permuted, run, tolerance)
    difference = found.difference
    if difference is not None:
        when = f"step {difference.step}" if difference.step else "the start"
        how = factor_in_words(reference, run, difference)
        relative = (
            f", {difference.relative:.2g} of its norm" if difference.relative < float("inf") else ", on one side alone"
        )
        sentence = (
            f"The runs part in {when}: the {difference.kind} of `{difference.name}` under {run.strategy} on "
            f"{run.num_ranks} ranks differs from that of {_whose(reference)}{how or relative}."
        )
        return Verdict(
            is_equal=False,
            sentence=sentence,
            causes=causes(reference, run, difference),
            reference=reference,
            run=run,
            comparison=found,
        )
    if found.num_compared == 0:
        sentence = (
            "Nothing was compared: two runs of one process, with the samples of each batch in another order, part in "
            "the first step already."
        )
        known = [] if permuted is None else causes_of_chaos(reference, permuted)
        why = known or ["The model amplifies rounding. Compare in a higher precision, such as `--precision 64-true`."]
        return Verdict(is_equal=False, sentence=sentence, causes=why, reference=reference, run=run, comparison=found)
    steps = f"{found.num_compared} step{'s' * (found.num_compared != 1)}"
    sentence = (
        f"The numbers of {_whose(reference)}: {run.strategy} on {run.num_ranks} ranks is equal in {steps}, within the "
        f"rounding of this model (at most {found.largest:.1e} of a tensor's norm)."
    )
    if found.parted_at is not None:
        sentence += (
            f" From step {found.parted_at} on two runs of one process part themselves: nothing is compared there."
        )
    elif len(run.steps) != len(reference.steps):
        sentence = (
            f"The runs have different numbers of steps: {len(run.steps)} under {run.strategy}, and "
            f"{len(reference.steps)} in {_whose(reference)}."
        )
        return Verdict(is_equal=False, sentence=sentence, causes=(), reference=reference, run=run, comparison=found)
    return Verdict(is_equal=True, sentence=sentence, causes=(), reference=reference, run=run, comparison=found)


def _whose(reference: Record) -> str:
    return "one process" if reference.num_ranks == 1 else f"{reference.strategy} on {reference.num_ranks} ranks"


def _is_file(word: str) -> bool:
    return os.path.exists(word) or os.sep in word or "." in word


def _refuse_other_model(reference: Record, run: Record, path: str) -> None:
    other = next(
        (name for name in (*run.initial, *reference.initial) if (name in run.initial) != (name in reference.initial)),
        None,
    )
    if other is not None:
        where = "this program" if other in run.initial else f"`{path}`"
        raise ValueError(f"`{path}` is the record of another model: `{other}` is in {where} alone. Record it again.")
