"""Runs a program as asked, and in one process, and compares: the implementation of `fabric verify`.

Each run is a process of its own, started like `fabric run`; a record is all that comes back.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any, TypeAlias

from fabric.checks.verify_record import Record, Recorder, Recording
from fabric.configure.parse import OPTIONS
from fabric.configure.run_options import ProgramId, as_variable
from fabric.launchers.process.os_process import die_with_parent
from fabric.strategies.data.rng import preserved_rngs
from fabric.strategies.strategy import Strategy
from fabric.verify.causes import RESUMED, SKIPPED, causes, causes_of_chaos, ratio_in_words
from fabric.verify.comparison import Comparison, compare, why_nothing


class ProgramError(ValueError):
    """The program failed before it had a record; the message has its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of `verify`."""

    is_equal: bool = False
    """Whether the run has the numbers of the reference."""
    sentence: str
    causes: Sequence[str] = ()
    """What may explain a difference, the likeliest first."""
    reference: Record
    run: Record
    comparison: Comparison | None = None
    """None: nothing was compared."""


Options: TypeAlias = Mapping[str, Any]
Start: TypeAlias = Callable[[Options, Recording], tuple[int, str]]
"""Runs the program with these options of `Fabric`, recorded. Returns its exit code and its output."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How often and in which way a program is run. Raises: ValueError: a number is out of range."""

    start: Start
    options: Options
    num_steps: int = 8
    keeps_dropout: bool = False
    tolerance: float | None = None
    announce: Callable[[str], object] = lambda words: None
    """Called with how the program runs, when a run starts."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"`steps` is {self.num_steps}. Write the number of steps to compare, from 1.")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ValueError(f"`tolerance` is {self.tolerance:g}. Write a part of a tensor's norm, from 0 to below 1.")

    def run(self, against: str | None = None, save: str | None = None) -> Verdict:
        """Run the program, and compare. `against`: a saved record, or a strategy; None: one process. `save`: a file for
        the record. Raises: ProgramError: the program failed. ValueError: a record is damaged, or of another model."""
        is_file = against is not None and (os.path.exists(against) or os.sep in against or "." in against)
        known = Record.load(Path(str(against))) if is_file else None
        if save is not None and not Path(save).absolute().parent.is_dir():
            raise ValueError(f"`{save}` cannot be written: `{Path(save).parent}` is no folder. Make it first.")
        with tempfile.TemporaryDirectory(prefix="fabric-verify-") as name:
            record = partial(self._record, Path(name) / "record")
            if against is not None and known is None:  # first: the program's `Fabric(...)` refuses an unknown name
                try:
                    known = record(f"under {against}", {**self.options, "strategy": against})
                except ProgramError as error:
                    neither = f"`--against {against}` is neither a file of `--save` nor a strategy."
                    said = str(error).replace(f"`strategy={against!r}` is not known.", neither)
                    raise ProgramError(said) from error
            try:
                run = record("as asked", {"sanitize": "always", **self.options})
            except ProgramError as error:
                if not str(error).startswith("`sanitize='always'`"):
                    raise
                run = record("as asked", self.options)  # the sanitizer reads no steps that XLA records
            if save is not None:
                run.save(Path(save))
            permuted = None
            if known is not None:
                _refuse_other_model(known, run, str(against))
            else:
                shares, asked = run.num_shares, self.options.get("strategy")
                kind = asked.in_one_process() if isinstance(asked, Strategy) else "auto"
                one = {name: self.options[name] for name in self.options if name in ("accelerator", "precision")}
                one |= {"strategy": kind, "devices": 1, "num_nodes": 1, "launcher": "auto"}
                known = record("in one process", one, in_place_of=shares)
                if shares > 1 and known.samples_of_first_step == shares * run.samples_of_first_step > 0:
                    shares = 1  # the program divides its batches by `world_size`: one process reads global ones itself
                    known = record("in one process again, over its own batches", one, in_place_of=shares)
                if self.tolerance is None:
                    permuted = record("in one process, permuted", one, in_place_of=shares, permuted=True)
        return judge(known, permuted, run, self.tolerance)

    def _record(self, path: Path, words: str, options: Options, **recorded: Any) -> Record:
        self.announce(f"{words}: {self.num_steps} steps of each optimizer, checkpoints in a temporary folder")
        recording = Recording(path=str(path), num_steps=self.num_steps, keeps_dropout=self.keeps_dropout, **recorded)
        code, said = self.start(options, recording)
        if path.exists():
            record = Record.load(path)
            path.unlink()
            return record
        refusal = said.rpartition("\n")[2].removeprefix("ValueError: ")
        if refusal.startswith(("`--", *(f"`{name}=" for name in OPTIONS))):  # `Fabric(...)` refuses it
            raise ProgramError(refusal)
        without = "ended {} without a record: it launches no `Fabric`, or leaves before `fabric.close()`; it printed"
        raise ProgramError(f"The program {('failed {}' if code else without).format(words)}:\n{said}")


def start_program(
    environ: Mapping[str, str], program: ProgramId, options: Options, recording: Recording
) -> tuple[int, str]:
    """Run a program as `fabric run` does, in a process of its own."""
    words = {name: str(value) for name, value in options.items()} | {"record": json.dumps(asdict(recording))}
    ended = subprocess.run(
        [sys.executable, *program.arguments],
        env={"PYTHONHASHSEED": "0", **environ, **as_variable(words, program)},
        preexec_fn=partial(die_with_parent, os.getpid()),
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

    try:
        with preserved_rngs():
            recorder = Recorder(recording, options["strategy"])
            Fabric(**options, plugins=[recorder]).launch(_run, function, args)
    except Exception as error:
        return 1, "".join(format_exception(error)).strip()
    return 0, ""


def _run(fabric: Any, function: Callable[..., object], args: Sequence[object]) -> None:
    with suppress(SystemExit):  # of the recorder, after the last step
        function(fabric, *args)


def judge(reference: Record, permuted: Record | None, run: Record, tolerance: float | None) -> Verdict:
    """Compare the records, and say in one sentence what was found."""
    verdict = partial(Verdict, reference=reference, run=run)
    who, whose = (f"{each.strategy} on {ranks_in_words(each.num_ranks)}" for each in (run, reference))
    whose = "one process" if reference.num_ranks == 1 else whose
    again = permuted or reference
    for record, words in ((run, f"under {who}"), (reference, "in the reference"), (again, "in its second run")):
        if reason := why_nothing(record):
            return verdict(sentence=f"Nothing was compared: {words}, {reason}.")
    found = compare(reference, permuted, run, tolerance)
    verdict = partial(verdict, comparison=found)
    if (difference := found.difference) is not None:
        when = f"step {difference.step}" if difference.step else "the start"
        ratio = ratio_in_words(run, difference)
        how = f"is {ratio} that" if ratio else f"differs by {difference.relative:.2g} of its norm from that"
        what = f"the {difference.kind} of `{difference.name}`"
        sentence = f"The runs part in {when}: {what} under {who} {how} of {whose}."
        return verdict(sentence=sentence, causes=[*causes(reference, run, difference)])
    skips = f"gradients overflowed in float16 under {found.skipped_by} alone"
    if found.num_compared == 0:
        words, why = f"in step 1 {skips}", [SKIPPED]
        if not found.skipped_by:
            words = "two runs of one process, with the samples of each batch in another order, part in step 1 already"
            firsts = [record.steps[0] for record in (run, reference, again)]
            loaded = {any(rank.changed for rank in step.ranks) for step in firsts}  # between set-up and the first step
            why = [RESUMED] if len(loaded) > 1 else causes_of_chaos(*firsts[1:])
        return verdict(sentence=f"Nothing was compared: {words}.", causes=why)
    ours, theirs = len(run.steps), len(reference.steps)
    if ours != theirs and (run if ours < theirs else reference).ended == "program":
        return verdict(sentence=f"The program takes {ours} steps under {who}, and {theirs} in {whose}.")
    sentence = (
        f"The numbers of {whose}: {who} is equal in {found.num_compared} step{'s' * (found.num_compared != 1)}, within "
        f"the rounding of this model (at most {found.largest:.1e} of a tensor's norm)."
    )
    if found.skipped_by:
        sentence += f" In step {found.num_compared + 1} {skips}: nothing is compared from there on."
    elif found.num_compared < min(ours, theirs):
        sentence += " From then on two runs of one process part themselves: nothing is compared there."
    steps = [str(number) for number, step in enumerate(run.steps, 1) if not (step.gradients or step.was_skipped)]
    if steps:
        sentence += f" No `fabric.backward` ran before step {', '.join(steps)}: only the weights were compared there."
    if not any(rank.num_batches for step in run.steps for rank in step.ranks):
        sentence += " No prepared loader was read: if all ranks read the same data, use `fabric.setup_dataloaders`."
    if run.ended == "program":
        sentence += " The program ended then, before the number of steps that was asked for."
    return verdict(is_equal=True, sentence=sentence)


def ranks_in_words(number: int) -> str:
    """A number of ranks, for a sentence."""
    return f"{number} rank{'s' * (number != 1)}"


def _refuse_other_model(reference: Record, run: Record, path: str) -> None:
    ours, theirs = run.shapes, reference.shapes
    other = next((name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)), None)
    if other is not None:
        raise ValueError(
            f"`{path}` is the record of another model: the shape of `{other}` is {ours.get(other, 'unknown')} in this "
            f"program, and {theirs.get(other, 'unknown')} in the record. Record it again."
        )
