"""What holds for every test: nothing it started, opened or changed outlives it."""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kernels
import pytest
import template
from packaging.version import Version

pytest_plugins = ("seen",)

KEPT = ("fork_server.py", "resource_tracker", "template.py")
"""Processes that end with the session: the fork server, Python's own tracker after a first spawn, and the template of
test programs."""


SEED = pytest.StashKey[str]()
LEFT = pytest.StashKey[list[str]]()
"""Tests marked `thorough` that were deselected: their files."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """What tests draw is the same in every run, so that a change is not refused for what it has not changed. What
    they train on is chosen here as well (`devices.py`)."""
    parser.addoption("--seed", default="1", help="from which tests draw: 1 by default; 'new' for another one")
    parser.addoption("--accelerator", default="cpu", help="what tests train on that are not about the CPU: cpu, cuda")
    parser.addoption("--of-torch", action="store_true", help="leave out tests that no other torch could change")
    parser.addoption(
        "--optimizers", action="append", choices=kernels.CHOICES, help="kernels of tests that step optimizers"
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The line that repeats a run, and the torch that it is over."""
    words = ["", *(config.getoption("--optimizers") or ())]
    kinds = " --optimizers ".join(words)
    drawn = f"draws: --seed {config.stash[SEED]}, on: --accelerator {config.getoption('--accelerator')}{kinds}"
    return [drawn, *_newer_torch()]


def _newer_torch() -> list[str]:
    """A line where the tests have not seen this torch before."""
    tested = (Path(__file__).parents[1] / "launchers/private_names.py").read_text()  # `fabric` is not always importable
    seen, installed = re.findall(r'^TESTED_TORCH = "[\d.]+ to ([\d.]+)"', tested, re.MULTILINE)[0], version("torch")
    is_newer = Version(installed).release[:2] > Version(seen).release
    return [f"torch {installed} is newer than {seen}, the newest that these tests had seen"] if is_newer else []


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of pytest-xdist draw from the seed of the process that started them, and share its template."""
    node.workerinput.update(seed=node.config.stash[SEED], template=template.address())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected, and left out, the same tests."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash[LEFT]


def pytest_unconfigure() -> None:
    """The process that test programs are forked from ends with the session."""
    template.end()


def pytest_configure(config: pytest.Config) -> None:
    """Signals mean what they mean, also where the tests run in a script's background, or under `nohup`: Ctrl-C or a
    hang-up is ignored there, and every program that a test starts would ignore it, too. Ranks and programs train on
    what `--accelerator` says."""
    assert "devices" not in sys.modules, "a conftest imported it before the option was known: all would run on the CPU"
    os.environ["TESTS_ACCELERATOR"] = config.getoption("--accelerator")
    config.stash[LEFT] = []
    if chosen := config.getoption("--optimizers"):
        os.environ[kernels.VARIABLE] = chosen[0]
        kernels.use_chosen()
    given = getattr(config, "workerinput", {"seed": config.getoption("--seed")})
    if "template" in given:
        template.share(given["template"])
    seed = given["seed"]
    config.stash[SEED] = str(random.randrange(2**31)) if seed == "new" else seed
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


WHOLE = (
    "tests/clients",
    "tests/contracts",
    "tests/conformance",
    "tests/device",
    "tests/fabric/test_hangs.py",
    "tests/launchers/test_fork.py::test_an_unsafe_fork",
    "tests/launchers/supervision/test_failure.py",
    "tests/strategies/gradients/test_sparse.py",
    "tests/strategies/model_parallel/pipeline/test_refusals.py",
    "tests/strategies/model_parallel/test_strategy.py::test_a_setup_that_would_change_the_numbers",
)
"""Where each parameter is a role, a strategy, a fault or a refusal of its own: these tests run with all of them."""


OVER_ANY_TORCH = (
    # Places of samples in an epoch, and files of ours. What torch's loaders and generators draw is tested beside them.
    *(
        f"tests/strategies/data/test_{name}"
        for name in ("indices", "positions", "repeated", "several_", "split", "stateful_", "streams", "token_")
    ),
    "tests/fabric/test_clean_room_tokens.py",
    # Words of the user, of Lightning, of DeepSpeed and of reports; the numbers of their strategies are those of others.
    *(f"tests/fabric/configure/test_{name}" for name in ("description", "explain", "request", "resolve")),
    "tests/fabric/lightning",
    "tests/fabric/monitor",
    "tests/fabric/output",
    "tests/fabric/report",
    "tests/strategies/deepspeed/test_config.py",
    # Calls of a step of ours, counted.
    "tests/fabric/test_step_cost.py",
    # The module that Python runs as a program, and the streams of ranks; the command that starts them.
    *(
        f"tests/launchers/test_choose.py::test_a_{name}"
        for name in ("child_process", "fabric_that", "program_that", "spawned_worker", "worker_of")
    ),
    "tests/launchers/supervision/test_output.py",
    "tests/fabric/cli/test_run.py",
    # What a job that waits says of its ranks: over the same torch, tests/device/test_dying.py sees it.
    "tests/fabric/test_hangs.py",
    # Several runs of programs, whose steps another test of the file compares.
    "tests/fabric/verify/test_verify.py::test_a_module_is_verified",
    "tests/fabric/verify/test_verify.py::test_nothing_is_left",
    "tests/fabric/verify/test_verify.py::test_the_command_verifies",
    "tests/fabric/verify/test_verify.py::test_a_wrong_program",
    # Arguments that are refused before anything starts, and names.
    "tests/fabric/test_bad_input.py",
    "tests/strategies/test_strategy_registry.py",
    # Processes and sockets of ours: who joins, who is watched, and what is said of a rank that failed.
    *(f"tests/launchers/{name}" for name in ("process/test_failure", "rendezvous", "test_watch")),
    # Names and words of checkpoints, and the order in which files of ours are written.
    "tests/conformance/test_checkpoint_programs.py",
    "tests/fabric/checkpoints/test_directory.py",
    *(f"tests/strategies/checkpoint/test_{name}" for name in ("kills", "object_store", "paths", "write_and_commit")),
    # Datasets of another library.
    "tests/strategies/data/test_huggingface.py",
    # Files of this repository.
    *(f"tests/test_{name}" for name in ("architecture", "one_row", "out_of_tree", "packaging")),
)
"""Tests that say nothing of torch's version and build, although the word stands in their files."""


def is_of_torch(item: pytest.Item) -> bool:
    """Whether torch's version or build could change how the test ends."""
    return not item.nodeid.startswith(OVER_ANY_TORCH) and bool(re.search(r"\btorch\b", text_of(item.path)))


def is_asked_for(item: pytest.Item) -> bool:
    """By `--of-torch`, or by `--optimizers` where that is alone."""
    if item.config.getoption("--of-torch"):
        return is_of_torch(item)
    return not item.config.getoption("--optimizers") or kernels.steps_optimizers(item.nodeid)


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: looking for garbage in it would take every worker a second."""
    gc.disable()
    yield
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test that steps optimizers runs with each of the kernels that `--optimizers` names: first all with one, then
    all with another."""
    chosen = metafunc.config.getoption("--optimizers")
    if chosen and kernels.steps_optimizers(metafunc.definition.nodeid):
        metafunc.parametrize("optimizers", chosen, indirect=True, scope="session")


@pytest.fixture(autouse=True, scope="session")
def optimizers(request: pytest.FixtureRequest) -> str | None:
    """The kernels of the tests that follow; None where the hook above has chosen none."""
    chosen: str | None = getattr(request, "param", None)
    if kernels.VARIABLE in os.environ:
        os.environ[kernels.VARIABLE] = chosen or ""
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a slow test with several parameters, all but a few cases are thorough: every tenth one, and at least one, run
    in `make test`. Where a test marks some of its cases itself, all others run. Tests marked `gpu` are for hardware
    that is not everywhere: `make test` on a machine with one runs them."""
    import torch

    cases: dict[tuple[Path, str, str], list[pytest.Item]] = {}
    for item in items:
        if " at 0x" in item.nodeid:  # another one in each worker of pytest-xdist, which then runs none of its tests
            raise pytest.UsageError(f"`{item.nodeid}` is named after an address: pass other `ids`")
        if isinstance(item, pytest.Function) and item.get_closest_marker("slow") and not item.nodeid.startswith(WHOLE):
            kind = item.callspec.params.get("optimizers", "") if item.name != item.originalname else ""
            cases.setdefault((item.path, item.originalname, kind), []).append(item)
    if left := [item for item in items if not is_asked_for(item)]:
        left[0].config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if is_asked_for(item)]
    for alike in cases.values():
        if any(item.get_closest_marker("thorough") for item in alike):
            continue
        kept = max(1, len(alike) // 10)
        chosen = {number * len(alike) // kept for number in range(kept)}
        for number, item in enumerate(alike):
            if number not in chosen:
                item.add_marker(pytest.mark.thorough)
    here, reason = torch.accelerator.is_available(), "needs an accelerator, and torch finds none here"
    for item in items:
        if item.get_closest_marker("without_gpu" if here else "gpu"):
            item.add_marker(pytest.mark.skip(reason="is about machines without an accelerator" if here else reason))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Keep what `-m 'not thorough'` leaves out, for the line at the end."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.config.stash[LEFT].append(item.path.relative_to(item.config.rootpath).as_posix())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was skipped and why, what is left to `make check`, and a torch that is new: at the end, where it is read."""
    for line in _newer_torch():
        terminalreporter.write_line(line)
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        counted = "; ".join(f"{number} ({reason})" for reason, number in reasons.most_common())
        terminalreporter.write_line(f"{reasons.total()} skipped: {counted}")
    if files := Counter(config.stash[LEFT]):
        counted = ", ".join(f"{number} of {file}" for file, number in files.most_common())
        terminalreporter.write_line(f"{files.total()} left to `make check`: {counted}")


FOREIGN = ("tqdm_monitor",)
"""Threads of others that last as long as the process: tqdm's, which torch's compiler imports where it is installed."""


@pytest.fixture(autouse=True)
def draws_are_those_of_the_seed(request: pytest.FixtureRequest) -> None:
    """Whatever ran before, and whichever tests were chosen."""
    random.seed(f"{request.config.stash[SEED]} {request.node.nodeid}")


@pytest.fixture(autouse=True, scope="session")
def ranks_come_from_a_fork_server() -> None:
    """`launch(function)` forks a process that has computed nothing. This one has, so its ranks do not begin with the
    modules, the warning filters and the plugins of whichever tests ran before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.zeros(4_000_000).add_(1)
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def forks_share_what_is_imported() -> None:
    """Python's collections look at no object of now: in a fork that copies its memory."""
    gc.collect()
    gc.freeze()


ENVIRONMENTS = ("browser", "clients", "clusters", "device", "over_horovod", "type_checking", "xla")
"""Folders of tests that run in an environment of their own, or on machines of their own."""


@pytest.fixture(autouse=True)
def ranks_import_nothing(request: pytest.FixtureRequest) -> None:
    """Before the first test that may start ranks: each of them takes a second to import what the fork server can."""
    folder = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    if request.node.get_closest_marker("slow") and folder not in ENVIRONMENTS:
        from worlds import preload

        preload()


@pytest.fixture(autouse=True)
def nothing_outlives_a_test() -> Iterator[None]:
    """No process, thread, process group or environment variable of a test is there after it."""
    environ, threads = _environ(), set(threading.enumerate())
    processes = set(_children())
    yield
    if set(threading.enumerate()) - threads or set(_children()) - processes:
        gc.collect()  # a loader in a cycle keeps its workers; collecting after every test would double the suite's time
    left = {pid: words for pid, words in _children().items() if pid not in processes}
    assert not left, f"processes outlived the test: {left}"
    _join_daemons(set(threading.enumerate()) - threads)
    alive = [thread.name for thread in set(threading.enumerate()) - threads if thread.name not in FOREIGN]
    assert not alive, f"threads outlived the test: {alive}"
    import torch.distributed

    assert not torch.distributed.is_initialized(), "a process group outlived the test"
    changed = sorted(set(_environ().items()) ^ set(environ.items()))
    assert not changed, f"the environment changed: {changed}"


def _environ() -> dict[str, str]:
    """The environment, but for what pytest says of the running test and what torch's compiler sets when imported."""
    others = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in others}


def _join_daemons(threads: set[threading.Thread]) -> None:
    """A thread that is just ending has time to do so; one that runs on is found right after."""
    for thread in threads:
        thread.join(timeout=1)


def _children() -> dict[int, str]:
    """Processes that this one started and that still live, with their command lines."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except FileNotFoundError:  # the thread has just ended
            continue
        for pid in children:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except FileNotFoundError:
                continue
            if words and not any(kept in words for kept in KEPT):
                found[int(pid)] = words
    found.update((pid, "a program that the template forked") for pid in template.running)
    return found
