"""The task of a process that is to become a rank: its world, and what to run.

A task is two pickles in an unnamed file: the import path, which needs only builtins to be read, and the rest. A file
and not a pipe, so that a large argument never blocks the supervisor before all ranks are started.
"""

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from fabric.launchers.process import pickling
from fabric.launchers.process import program as main_module
from fabric.launchers.rank.rank import become_rank, rank_environ, run_and_end, run_to_the_end
from fabric.launchers.rank.settings import read_settings, restore
from fabric.launchers.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFunction:
    """Call a function, report its result, and end; in surroundings like those of the launching process."""

    environ: Mapping[str, str]
    started_in: str
    """The directory in which the program is imported."""
    folder: str
    argv: list[str]
    settings: Mapping[str, Any]
    call: bytes
    """`(worker, args)`, pickled."""
    main_file: str | None
    """The script to import first; None if the call refers to nothing defined in it."""
    main_module: str | None
    """Its name, if it was started as `python -m name`."""
    everyone: bool
    """Whether the results of all ranks are returned, or only that of the first."""


def write(world: World, task: CallFunction | main_module.Program) -> IO[bytes]:
    """Write the task, a call or the user's program, to be run again; returns an open file, at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    pickle.dump([entry or os.getcwd() for entry in sys.path], file)  # a rank may change its folder before it imports
    pickle.dump((world, task), file)
    file.flush()
    file.seek(0)
    return file


def call_function(worker: Callable[..., Any], args: tuple[Any, ...], *, everyone: bool, launcher: str) -> CallFunction:
    """The task of calling a function. Raises TypeError if function or arguments cannot be pickled, by value either."""
    main_file = main_module.file_of_main()
    try:
        call, needs_main = _pickle_call((worker, args), has_main_file=main_file is not None)
    except Exception as error:
        raise TypeError(
            f"`launcher={launcher!r}` sends the function and its arguments to new processes, and they cannot be "
            f"pickled, by `cloudpickle` either: {error}. Create inside the function what cannot be pickled, or pass "
            "`launcher='fork'`."
        ) from error
    spec = sys.modules["__main__"].__spec__
    return CallFunction(
        environ=dict(os.environ),
        started_in=main_module.STARTED_IN,
        folder=os.getcwd(),
        argv=list(sys.argv),
        settings=read_settings(),
        call=call,
        main_file=main_file if needs_main else None,
        main_module=None if spec is None or spec.name == "__main__" else spec.name,  # the latter: `python FOLDER`
        everyone=everyone,
    )


def _pickle_call(call: tuple[Callable[..., Any], tuple[Any, ...]], *, has_main_file: bool) -> tuple[bytes, bool]:
    """Pickle the call; returns the bytes, and whether they refer to what is defined in the file of `__main__`.

    In a worker of `multiprocessing` that module is named `__mp_main__`, and `cloudpickle` refers to what is in it.
    """
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
        needs_main = b"__main__" in pickled or b"__mp_main__" in pickled
        if has_main_file or not needs_main:
            return pickled, needs_main
    pickled = pickling.by_value(call)
    return pickled, b"__mp_main__" in pickled


def run_task(file: IO[bytes], report_fd: int, parent: int) -> NoReturn:
    """Become the rank, run the task, and exit."""
    world, task = pickle.load(file)
    if isinstance(task, main_module.Program):
        run_to_the_end(become_rank(world, report_fd, parent), lambda: main_module.run_again(task))
    os.environ.clear()
    os.environ.update(task.environ)
    os.chdir(task.started_in)
    sys.argv[:] = task.argv
    reporter = become_rank(world, report_fd, parent)
    run_and_end(reporter, task.everyone, _call, world, task)


def _call(world: World, task: CallFunction) -> Any:
    if task.main_file is not None:
        main_module.import_main(task.main_file, task.main_module)
    os.chdir(task.folder)
    worker, args = pickle.loads(task.call)
    restore(task.settings)  # after the import, which may have drawn random numbers
    return worker(world, *args)


def environ_of(world: World) -> dict[str, str]:
    """The environment of a new interpreter, set before torch reads it."""
    return {**os.environ, **rank_environ(world, dict(os.environ))}
