"""What every launcher holds, whatever it starts: one suite, run as programs of their own, as a user would."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import template
from processes import run

PROGRAM = '''
import json, os, sys
from fabric.launchers import Topology, detect_world, join
from fabric.launchers.choose import choose_launcher

def function(world, word):
    """Two meetings, one after another, in which every rank reads what every other wrote; and a large result."""
    read = []
    for number in range(2):
        store = join(world, 60, print)
        store.set(f"from {world.rank}", f"{number}.{world.rank}")
        read.append([store.get(f"from {rank}").decode() for rank in range(world.size)])
    store.set(f"hash of {world.rank}", str(hash("a")))
    hashes = {store.get(f"hash of {rank}") for rank in range(world.size)}
    return place(world) | {"word": word, "read": read, "hashes": len(hashes), "large": bytes([world.rank]) * 10_000_000}

def place(world):
    return {"rank": world.rank, "size": world.size, "local_rank": world.local_rank, "launcher": world.launcher,
            "world_size": os.environ.get("WORLD_SIZE"), "parent": os.getppid(),
            "sees": detect_world(os.environ) == (world if world.size > 1 else None)}

def fail(world):
    raise KeyError("boom")

def launcher(function):
    size = int(sys.argv[2])
    return choose_launcher(sys.argv[1], Topology(num_processes=size), function=function, world=detect_world(os.environ))

def main(case):
    before = dict(os.environ)
    if case == "launch":
        result = launcher(function).launch(function, "argument")
        result |= {"large": len(result["large"]), "unchanged": dict(os.environ) == before}
    elif case == "fail":
        try:
            launcher(fail).launch(fail)
        except Exception as error:
            cause = error if isinstance(error, KeyError) else error.__cause__
            result = [type(cause).__name__, list(cause.args)]
    else:
        result = place(launcher(None).enter())
    sys.stdout.write(json.dumps(result) + "\\n")

if __name__ == "__main__":
    main(sys.argv[3])
'''

STARTING = [("inline", 1), ("fork", 2), ("forkserver", 2), ("spawn", 2), ("elastic", 2)]
ENTERING = [("inline", 1), ("fork", 2), ("script", 2), ("elastic", 2)]
pytestmark = pytest.mark.slow


@functools.cache
def outcome(word: str, size: int, case: str) -> list[Any]:
    """What the processes of one launch wrote, one line each."""
    before = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)] if word == "external" else []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        done = run([*before, program, word, str(size), case], fresh=word == "spawn", **{template.FORKS: "yes"})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if " waits for " not in line]  # on a busy machine


@pytest.mark.parametrize(("word", "size"), STARTING)
def test_the_result_of_rank_zero_is_returned_once(word: str, size: int) -> None:
    (result,) = outcome(word, size, "launch")
    assert (result["rank"], result["size"], result["local_rank"]) == (0, size, 0)
    assert (result["launcher"], result["word"]) == (word, "argument")


@pytest.mark.parametrize(("word", "size"), STARTING)
def test_a_rank_finds_its_own_world_in_its_environment(word: str, size: int) -> None:
    (result,) = outcome(word, size, "launch")
    assert result["sees"]
    assert result["world_size"] == (str(size) if size > 1 else None)


@pytest.mark.parametrize(("word", "size"), STARTING)
def test_all_ranks_connect_twice(word: str, size: int) -> None:
    (result,) = outcome(word, size, "launch")
    assert result["read"] == [[f"{number}.{rank}" for rank in range(size)] for number in range(2)]


@pytest.mark.parametrize(("word", "size"), STARTING)
def test_a_string_has_one_hash_on_all_ranks(word: str, size: int) -> None:
    assert outcome(word, size, "launch")[0]["hashes"] == 1


@pytest.mark.parametrize(("word", "size"), STARTING)
def test_a_result_larger_than_a_pipe_is_returned(word: str, size: int) -> None:
    assert outcome(word, size, "launch")[0]["large"] == 10_000_000


@pytest.mark.parametrize(("word", "size"), STARTING)
def test_the_environment_of_the_launching_process_is_unchanged(word: str, size: int) -> None:
    assert outcome(word, size, "launch")[0]["unchanged"]


@pytest.mark.parametrize(("word", "size"), STARTING)
def test_an_exception_of_a_rank_is_raised_in_the_launching_process(word: str, size: int) -> None:
    assert outcome(word, size, "fail") == [["KeyError", ["boom"]]]


@pytest.mark.parametrize(("word", "size"), ENTERING)
def test_every_rank_continues_after_the_call_of_launch(word: str, size: int) -> None:
    results = outcome(word, size, "enter")
    assert sorted(result["rank"] for result in results) == list(range(size))


@pytest.mark.parametrize("case", ["launch", "enter"])
def test_an_external_world_runs_every_rank_once_and_each_keeps_its_own_result(case: str) -> None:
    results = outcome("external", 2, case)
    assert sorted(result["rank"] for result in results) == [0, 1]
    assert {result["launcher"] for result in results} == {"torchelastic"}
    assert all(result["sees"] for result in results)
