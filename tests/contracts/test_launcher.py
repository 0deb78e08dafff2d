"""What every launcher holds, whatever it starts: one suite, run as programs of their own, as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run

PROGRAM = '''
import json, os, random, sys
from fabric.launchers import Topology, choose_launcher, detect_world, join

def place(world, word):
    return {"rank": world.rank, "size": world.size, "local_rank": world.local_rank, "launcher": world.launcher,
            "environ": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")},
            "sees": detect_world(os.environ) == (world if world.size > 1 else None), "pid": os.getpid(), "word": word}

def meet(world):
    """Two meetings, one after another, in which every rank reads what every other wrote."""
    read = []
    for number in range(2):
        store = join(world, 60, print)
        store.set(f"from {world.rank}", f"{number}.{world.rank}")
        read.append([store.get(f"from {rank}").decode() for rank in range(world.size)])
    return read

def large(world, num_bytes):
    return world.rank.to_bytes(1, "big") * num_bytes

def fail(world):
    raise KeyError("boom")

def launcher(word, size, function):
    return choose_launcher(word, Topology(num_processes=size), function=function, world=detect_world(os.environ))

BEFORE = dict(os.environ)
WORD, SIZE, CASE = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def main():
    match CASE:
        case "place":
            result = launcher(WORD, SIZE, place).launch(place, "argument")
        case "meet":
            result = launcher(WORD, SIZE, meet).launch(meet)
        case "large":
            result = len(launcher(WORD, SIZE, large).launch(large, 10_000_000))
        case "environment":
            launcher(WORD, SIZE, meet).launch(meet)
            result = dict(os.environ) == BEFORE
        case "fail":
            try:
                launcher(WORD, SIZE, fail).launch(fail)
            except Exception as error:
                cause = error if isinstance(error, KeyError) else error.__cause__
                result = [type(cause).__name__, list(cause.args)]
        case "enter":
            result = place(launcher(WORD, SIZE, None).enter(), "entered")
    if result is not None:
        sys.stdout.write(json.dumps(result) + "\\n")

if __name__ == "__main__":
    main()
'''

OURS = [("inline", 1), ("fork", 2), ("forkserver", 2), ("spawn", 2), ("script", 2)]
pytestmark = pytest.mark.slow


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def outcome(program: Path, word: str, size: int, case: str) -> list[object]:
    """What the processes of one launch wrote, one line each."""
    before = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)] if word == "external" else []
    done = run([*before, program, word, str(size), case])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("word", "size"), OURS)
def test_the_result_of_rank_zero_comes_home(program: Path, word: str, size: int) -> None:
    (result,) = outcome(program, word, size, "place")
    assert isinstance(result, dict)
    assert (result["rank"], result["size"], result["local_rank"]) == (0, size, 0)
    assert (result["launcher"], result["word"]) == (word, "argument")


@pytest.mark.parametrize(("word", "size"), OURS)
def test_a_rank_finds_its_own_world_in_its_environment(program: Path, word: str, size: int) -> None:
    (result,) = outcome(program, word, size, "place")
    assert isinstance(result, dict)
    assert result["sees"]
    assert result["environ"]["WORLD_SIZE"] == (str(size) if size > 1 else None)


@pytest.mark.parametrize(("word", "size"), OURS)
def test_all_ranks_meet_twice(program: Path, word: str, size: int) -> None:
    (result,) = outcome(program, word, size, "meet")
    assert result == [[f"{number}.{rank}" for rank in range(size)] for number in range(2)]


@pytest.mark.parametrize(("word", "size"), OURS)
def test_a_result_larger_than_a_pipe_comes_home(program: Path, word: str, size: int) -> None:
    assert outcome(program, word, size, "large") == [10_000_000]


@pytest.mark.parametrize(("word", "size"), OURS)
def test_the_environment_of_the_launching_process_is_left_alone(program: Path, word: str, size: int) -> None:
    assert outcome(program, word, size, "environment") == [True]


@pytest.mark.parametrize(("word", "size"), OURS)
def test_an_exception_comes_home_as_itself(program: Path, word: str, size: int) -> None:
    assert outcome(program, word, size, "fail") == [["KeyError", ["boom"]]]


@pytest.mark.parametrize(("word", "size"), [("inline", 1), ("fork", 2), ("script", 2)])
def test_every_rank_goes_on_from_the_line_it_entered(program: Path, word: str, size: int) -> None:
    results = outcome(program, word, size, "enter")
    assert sorted(result["rank"] for result in results if isinstance(result, dict)) == list(range(size))


@pytest.mark.parametrize("case", ["place", "meet", "enter"])
def test_an_external_world_runs_every_rank_once(program: Path, case: str) -> None:
    results = outcome(program, "external", 2, case)
    assert len(results) == 2
    if case == "meet":
        assert results == [[["0.0", "0.1"], ["1.0", "1.1"]]] * 2
    else:
        assert sorted(result["rank"] for result in results if isinstance(result, dict)) == [0, 1]
        assert {result["launcher"] for result in results if isinstance(result, dict)} == {"torchelastic"}

