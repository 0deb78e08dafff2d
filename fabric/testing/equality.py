"""`verify`: whether a program has the numbers of one process, for a user's own tests."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from fabric.configure.run_options import program_of
from fabric.strategies.strategy import Strategy
from fabric.verify.runs import Verdict, Verification, start_function, start_program


def verify(
    program: str | os.PathLike[str] | Callable[..., object],
    *args: Any,
    strategy: str | Strategy = "ddp",
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
    asked = {"accelerator": "cpu", "strategy": strategy, "devices": devices, **options}
    if callable(program):
        start = partial(start_function, program, args)
    else:
        script = program_of(os.fspath(program), [str(each) for each in args], is_module=False)
        start = partial(start_program, os.environ, script)
    return Verification(start, asked, steps, keep_dropout, tolerance).run()
