"""Two supervisors, each of one node: here both on this machine, in `tests/clusters/test_two_nodes.py` apart."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import Program, free_port, running

PROGRAM = """
import json, os, sys
from fabric.launchers import Topology, detect_world, join
from fabric.launchers.choose import choose_launcher

def function(world, case):
    store = join(world, 60, print)
    if case == "fail" and world.rank == 3:
        raise ValueError("boom")
    if case == "fail":
        store.get("never")
    store.set(str(world.rank), f"{world.node_rank}.{world.local_rank}")
    return [store.get(str(rank)).decode() for rank in range(world.size)]

def main():
    node, port, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    topology = Topology(num_processes=2, num_nodes=2, node_rank=node, main_port=port)
    launcher = choose_launcher("auto", topology, function=function, world=detect_world(os.environ))
    sys.stdout.write(json.dumps(launcher.launch(function, case)) + "\\n")

if __name__ == "__main__":
    main()
"""


def start_both(program: Path, case: str, stack: ExitStack) -> list[Program]:
    """The second node first: it waits for the first."""
    program.write_text(PROGRAM)
    port = str(free_port())
    nodes = [stack.enter_context(running([program, node, port, case])) for node in ("1", "0")]
    return nodes[::-1]


@pytest.mark.slow
def test_the_ranks_of_two_nodes_are_one_world(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for node in start_both(tmp_path / "program.py", "work", stack):
            output, errors = node.process.communicate(timeout=60)
            assert json.loads(output) == ["0.0", "0.1", "1.0", "1.1"], errors


@pytest.mark.slow
def test_a_failure_on_the_second_node_is_named_there(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = start_both(tmp_path / "program.py", "fail", stack)
        _, errors = second.process.communicate(timeout=60)
        assert second.process.returncode == 1
        assert "rank 3 of 4 failed first: ValueError: boom" in errors
        first.process.kill()
