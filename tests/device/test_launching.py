"""Ranks have devices of their own, whatever the program has done before `launch`, and by every launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import free_port, run, running

PROGRAM = """
import os, sys
import torch
from torch.utils.data import DataLoader
from fabric import Fabric

CREATED = []

def work(fabric):
    own = torch.ones(2, device=fabric.device)
    assert own.device == fabric.device and torch.cuda.current_device() == fabric.device.index
    physical = torch.cuda.get_device_properties(fabric.device).pci_bus_id - 1
    size, total = fabric.world_size, fabric.all_reduce(own * (fabric.global_rank + 1), reduce_op="sum")
    assert total.sum() == size * (size + 1)
    found = fabric.all_gather({"index": fabric.device.index, "physical": physical, "forked": len(CREATED)})
    return {name: numbers.int().tolist() for name, numbers in found.items()}

if __name__ == "__main__":
    CREATED.append("before the launch")
"""


def launching(folder: Path, end: str) -> list[str | Path]:
    """A program that runs `work` on two ranks and prints what it returns, for a machine of four devices."""
    lines = "".join(f"    {line}\n" for line in end.splitlines())
    (folder / "program.py").write_text(PROGRAM + lines)
    return [folder / "program.py"]


def found(output: str) -> dict[str, list[int]]:
    """What `work` has returned."""
    numbers = {name: words.split(", ") for name, words in re.findall(r"'(\w+)': \[([\d, ]+)\]", output)}
    return {name: [int(word) for word in words] for name, words in numbers.items()}


@pytest.mark.parametrize(
    ("before", "can_fork"),
    [
        ("pass", True),
        ("torch.cuda.device_count(), torch.accelerator.device_count()", True),
        ("torch.accelerator.current_accelerator()", True),
        ("fabric.seed_everything(1)", True),
        ("torch.cuda.is_available()", False),
        ("torch.accelerator.is_available()", False),
        ("torch.cuda.get_device_name(0)", False),
        ("torch.cuda.set_device(1)", False),
        ("torch.accelerator.set_device_index(1)", False),
        ("(torch.ones(3, device='cuda') + 1).sum().item()", False),
        ("with torch.autocast('cuda', torch.bfloat16): pass", False),
        ("list(DataLoader(torch.ones(4, 2), pin_memory=True))", False),
    ],
)
def test_what_a_program_does_before_launch_costs_it_no_more_than_the_fork(
    before: str, can_fork: bool, tmp_path: Path
) -> None:
    fabric = f"fabric = Fabric(accelerator='cuda', devices=2)\n{before}"
    done = run(launching(tmp_path, f"{fabric}\nprint(fabric.launch(work))"))
    assert found(done.stdout) == {"index": [0, 1], "physical": [0, 1], "forked": [0, 0]}, done.stderr
    fork = "fabric = Fabric(accelerator='cuda', devices=2, launcher='fork')"
    done = run(launching(tmp_path, f"{fork}\n{before}\nprint(fabric.launch(work))"))
    if can_fork:
        assert found(done.stdout) == {"index": [0, 1], "physical": [0, 1], "forked": [1, 1]}, done.stderr
    else:
        assert "`launcher='fork'`: a forked process cannot use cuda" in done.stderr


def test_launch_without_a_function_runs_the_script_again_where_a_fork_could_not_use_the_devices(
    tmp_path: Path,
) -> None:
    end = "torch.cuda.is_available()\nfabric = Fabric(accelerator='cuda', devices=2)\nfabric.launch()"
    done = run(launching(tmp_path, f"{end}\nif fabric.is_global_zero: print('rank', work(fabric))\nelse: work(fabric)"))
    assert found(done.stdout) == {"index": [0, 1], "physical": [0, 1], "forked": [1, 1]}, done.stderr


@pytest.mark.parametrize(("launcher", "forked"), [("fork", True), ("auto", False)])
def test_ranks_on_the_cpu_fork_after_a_device_was_used_where_it_was_asked_for(
    launcher: str, forked: bool, tmp_path: Path
) -> None:
    """They lose what they use of a device without training on it, pinned memory: `auto` runs the script again."""
    end = f"""torch.cuda.is_available()
fabric = Fabric(accelerator='cpu', strategy='ddp', devices=2, launcher='{launcher}')
started = os.getpid()
fabric.launch()
pinned = {not forked}
sum(batch.sum().item() for batch in fabric.setup_dataloaders(DataLoader(torch.ones(8, 2), pin_memory=pinned)))
print('forked', started != os.getpid(), int(fabric.all_reduce(1, reduce_op='sum')))"""
    done = run(launching(tmp_path, end))
    assert done.stdout == f"forked {forked} 2\n" * 2, done.stderr


@pytest.mark.parametrize("launch", ["launch()", "launch(work)"])
def test_a_fork_that_was_asked_for_and_could_not_use_the_devices_is_refused(launch: str, tmp_path: Path) -> None:
    end = f"torch.cuda.is_available()\nFabric(accelerator='cuda', devices=2, launcher='fork').{launch}"
    done = run(launching(tmp_path, end))
    assert "`launcher='fork'`: a forked process cannot use cuda, which this process has initialised" in done.stderr
    assert "Call `launch` before that, or pass `launcher='auto'`." in done.stderr


def test_code_without_a_file_that_could_not_fork_is_refused_with_what_to_write() -> None:
    lines = "import torch; from fabric import Fabric; torch.cuda.is_available()"
    done = run(["-c", f"{lines}; Fabric(accelerator='cuda', devices=2).launch()"])
    assert "`launch()` in `python -c` cannot fork: a forked process cannot use cuda" in done.stderr
    assert "or pass what the ranks run: `launch(function)`" in done.stderr


@pytest.mark.parametrize("launcher", ["fork", "forkserver", "spawn"])
def test_every_launcher_gives_each_rank_a_device(launcher: str, tmp_path: Path) -> None:
    end = f"print(Fabric(accelerator='cuda', devices=2, launcher='{launcher}').launch(work))"
    done = run(launching(tmp_path, end))
    assert found(done.stdout)["index"] == [0, 1], done.stderr


def test_ranks_of_torchrun_have_a_device_each(tmp_path: Path) -> None:
    end = "fabric = Fabric(accelerator='cuda', devices=2)\nfabric.launch()\nprint(work(fabric))"
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*by_torchrun, *launching(tmp_path, end)])
    assert found(done.stdout)["index"] == [0, 1], done.stderr


@pytest.mark.parametrize(
    ("visible", "devices", "physical"),
    [
        pytest.param("0,1,2,3", "2", [0, 1], marks=pytest.mark.thorough),  # without the variable too, above
        pytest.param("2,3", "'auto'", [2, 3], marks=pytest.mark.thorough),  # as in the next, in another order
        ("3,1", "'auto'", [3, 1]),
        ("3,1,0", "[2, 0]", [0, 3]),
        ("1,3,9,0", "'auto'", [1, 3]),
    ],
)
def test_ranks_work_on_the_devices_that_are_visible_in_their_order(
    visible: str, devices: str, physical: list[int], tmp_path: Path
) -> None:
    end = f"print(Fabric(accelerator='cuda', devices={devices}).launch(work))"
    done = run(launching(tmp_path, f"os.environ['CUDA_VISIBLE_DEVICES'] = '{visible}'\n{end}"))
    assert found(done.stdout)["physical"] == physical, done.stderr


def test_devices_may_be_named_by_their_identity(tmp_path: Path) -> None:
    name = "f'GPU-{torch.cuda.get_device_properties(number).uuid}'"
    first = f"print(','.join({name} for number in (2, 1)))"
    identities = run(launching(tmp_path, first)).stdout.strip()
    end = f"os.environ['CUDA_VISIBLE_DEVICES'] = '{identities}'\nprint(Fabric(accelerator='cuda').launch(work))"
    done = run(launching(tmp_path, end))
    assert found(done.stdout)["physical"] == [2, 1], done.stderr


def test_a_list_of_devices_gives_each_rank_its_own(tmp_path: Path) -> None:
    done = run(launching(tmp_path, "print(Fabric(accelerator='cuda', devices=[1, 3]).launch(work))"))
    assert found(done.stdout) == {"index": [1, 3], "physical": [1, 3], "forked": [0, 0]}, done.stderr


@pytest.mark.parametrize(
    ("visible", "devices", "words"),
    [
        (None, "5", "asks for 5 devices of `accelerator='cuda'`, but this process sees 4 cuda devices"),
        (None, "[1, 4]", "asks for device 4 of `accelerator='cuda'`, but this process sees 4 cuda devices"),
        ("2", "2", "asks for 2 devices of `accelerator='cuda'`, but this process sees 1 cuda device."),
        ("", "1", "is built for cuda, and this process sees no cuda device. Check its driver"),
        ("-1", "1", "this process sees no cuda device"),
    ],
)
def test_devices_that_there_are_not_are_refused_before_anything_starts(
    visible: str | None, devices: str, words: str, tmp_path: Path
) -> None:
    set_first = "" if visible is None else f"os.environ['CUDA_VISIBLE_DEVICES'] = '{visible}'\n"
    done = run(launching(tmp_path, f"{set_first}Fabric(accelerator='cuda', devices={devices})\nprint('made')"))
    assert words in done.stderr.splitlines()[-1]
    assert "made" not in done.stdout


NODE = """
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
fabric = Fabric(accelerator="cuda", devices=2, num_nodes=2)
fabric.launch()
print(work(fabric))
"""


def test_two_nodes_of_two_devices_are_one_world_of_four(tmp_path: Path) -> None:
    node = launching(tmp_path, NODE.strip())
    start = ("-m", "fabric", "run", "--main-address", "127.0.0.1", "--main-port", str(free_port()), "--node-rank")
    with running([*start, "0", *node, "0,1"]) as first, running([*start, "1", *node, "2,3"]) as second:
        for program in (first, second):
            output, errors = program.process.communicate(timeout=60)
            assert found(output)["physical"] == [0, 1, 2, 3], errors
            assert found(output)["index"] == [0, 1, 0, 1], errors


KERNEL = """
import sys
from jupyter_client.manager import start_new_kernel

def show(message):
    content = message["content"]
    print(content.get("text") or content.get("evalue", ""), end="", flush=True)

manager, client = start_new_kernel(kernel_name="python3")
try:
    for cell in sys.argv[1:]:
        client.execute_interactive(cell, timeout=60, output_hook=show)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""
CELL = """
import torch
from fabric import Fabric

def index_of_all(fabric):
    return fabric.all_gather(torch.ones(1, device=fabric.device) * fabric.device.index).flatten().tolist()

fabric = Fabric(accelerator="cuda", devices=2)
print("first", fabric.launch(index_of_all))
"""


def test_a_notebook_launches_a_function_of_a_cell_before_it_has_used_a_device_and_after(tmp_path: Path) -> None:
    again = "print('on', torch.ones(1, device='cuda').item())\nprint('second', fabric.launch(index_of_all))"
    done = run(["-c", KERNEL, CELL, again, "fabric.launch()"])
    assert "first [0.0, 1.0]\non 1.0\nsecond [0.0, 1.0]\n" in done.stdout, done.stdout + done.stderr
    assert "Pass what they do as a function" in done.stdout
