"""Two supervisors, each of one node: here both on this machine, in `tests/clusters/test_two_nodes.py` apart."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import Program, free_port, running

PROGRAM = """
import json, os, sys
import torch
from fabric.launchers import Topology, detect_world, join
from fabric.launchers.choose import choose_launcher

def function(world, case):
    store = join(world, 60, lambda text: print(text, file=sys.stderr))
    if case != "work":
        torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        torch.distributed.all_reduce(torch.ones(1))
        if world.rank == 3:
            break_down(case)
        torch.distributed.all_reduce(torch.ones(1))
    store.set(str(world.rank), f"{world.node_rank}.{world.local_rank}")
    return [store.get(str(rank)).decode() for rank in range(world.size)]

def break_down(case):
    if case == "raise":
        raise ValueError("boom")
    if case == "killed":
        os.kill(os.getpid(), 9)
    sys.exit(3)

def main():
    node, port, case, num_nodes, devices = sys.argv[1:]
    topology = Topology(
        num_processes=int(devices), num_nodes=int(num_nodes), node_rank=int(node), main_port=int(port)
    )
    launcher = choose_launcher("auto", topology, function=function, world=detect_world(os.environ))
    sys.stdout.write(json.dumps(launcher.launch(function, case)) + "\\n")

if __name__ == "__main__":
    main()
"""


def start_both(program: Path, case: str, stack: ExitStack, *, second: tuple[str, str] = ("2", "2")) -> list[Program]:
    """The second node first: it waits for the first. `second`: its number of nodes, and of devices."""
    program.write_text(PROGRAM)
    port = str(free_port())
    words = {"0": ("2", "2"), "1": second}
    nodes = [stack.enter_context(running([program, node, port, case, *words[node]])) for node in ("1", "0")]
    return nodes[::-1]


@pytest.mark.slow
def test_the_ranks_of_two_nodes_are_one_world(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for node in start_both(tmp_path / "program.py", "work", stack):
            output, errors = node.process.communicate(timeout=60)
            assert json.loads(output) == ["0.0", "0.1", "1.0", "1.1"], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("raise", "ValueError: boom"),
        ("killed", "killed by SIGKILL"),
        ("leaves", "left with exit code 3 before its function returned"),
    ],
)
def test_both_nodes_name_the_rank_that_failed_first(tmp_path: Path, case: str, words: str) -> None:
    """On node 0 its own ranks have only lost a connection."""
    with ExitStack() as stack:
        nodes = start_both(tmp_path / "program.py", case, stack)
        errors = [node.process.communicate(timeout=60)[1] for node in nodes]
    assert [node.process.returncode for node in nodes] == [1, 1]
    assert f"rank 3 of 4 failed first, on {socket.gethostname()}: {words}" in errors[0], errors[0]
    assert f"rank 3 of 4 failed first: {words}" in errors[1], errors[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "words"),
    [(("3", "2"), "`num_nodes=3`, 6 ranks in all; 2 of"), (("2", "1"), "`num_nodes=2`, 2 ranks in all; 1 of")],
)
def test_nodes_that_disagree_about_the_world_end_with_the_words_of_both(
    tmp_path: Path, second: tuple[str, str], words: str
) -> None:
    with ExitStack() as stack:
        nodes = start_both(tmp_path / "program.py", "work", stack, second=second)
        errors = [node.process.communicate(timeout=60)[1] for node in nodes]
    assert [node.process.returncode for node in nodes] == [1, 1]
    for error in errors:
        assert "ValueError: The nodes disagree." in error, error
        assert "with `num_nodes=2`, 4 ranks in all; 2 of them on node 0. " in error
        assert f"with {words} them on node 1. " in error
