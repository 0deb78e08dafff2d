"""`verify`: whether a program has the numbers of one process, for a user's own tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fabric.cli.run import program_of
from fabric.verify.runs import Program, Verdict, verify_function, verify_program


def verify(
    program: str | os.PathLike[str] | Callable[..., object],
    *args: Any,
    strategy: str = "ddp",
    devices: int = 2,
    steps: int = 8,
    tolerance: float | None = None,
    keep_dropout: bool = False,
    **options: Any,
) -> Verdict:
    """Run a program under `strategy` and in one process over the same global batches, and compare step by step.

        verdict = verify("train.py", "--config", "small.yaml", strategy="fsdp", devices=4)
        assert verdict.is_equal, verdict

    `program`: the path of a script, `args` being its own arguments; or a function `program(fabric, *args)`, which
    makes model and loaders, and trains. `steps`: of each optimizer. `tolerance`: of a tensor, relative to its norm;
    None: what rounding of this model does is measured. `options`: further options of `Fabric`: `precision`, `launcher`.
    Raises: ValueError: there is no such script. ProgramError: the program failed.
    """
    asked = {"strategy": strategy, "devices": devices, **options}
    if callable(program):
        return verify_function(program, args, {"accelerator": "cpu", **asked}, steps, tolerance, keep_dropout)
    identity = program_of(os.fspath(program), [str(each) for each in args], is_module=False)
    words = {name: str(value) for name, value in asked.items()}
    whole = Program(program=identity, options=words, num_steps=steps, keeps_dropout=keep_dropout)
    return verify_program(whole, tolerance)
