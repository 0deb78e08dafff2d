"""A fork is allowed exactly where the child can compute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from processes import run

COMPUTE = """
import os, sys, torch
def compute():
    torch.set_num_threads(2)
    x = torch.randn(800, 800, requires_grad=True)
    ((x @ x) + torch.randn(800, 800)).sum().backward()
    torch.randn(4_000_000).add_(1).sum()

from fabric.launchers.fork import why_fork_is_unsafe
{before}
reason = why_fork_is_unsafe()
if reason is not None:
    sys.stdout.write(reason)
    sys.stdout.flush()
    os._exit(7)
pid = os.fork()
if pid == 0:
    compute()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "",
        "import numpy",
        "import sklearn.linear_model",
        "import pyarrow; pyarrow.array(range(1_000_000)).to_pylist()",
        "torch.zeros(3) + 1",
        "model = torch.nn.Linear(4, 4); torch.optim.SGD(model.parameters())",
        "torch.cuda.is_available()",
        "import torch.distributed as dist; dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)",
    ],
)
def test_a_child_of_an_accepted_fork_computes(before: str) -> None:
    done = run(["-c", COMPUTE.format(before=before)])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("compute()", "native thread(s), which tensor operations have left behind"),
        ("torch.randn(4_000_000).add_(1)", "native thread(s), which tensor operations have left behind"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True, name='busy').start()",
            "this process runs other Python threads (busy), whose locks a fork would copy",
        ),
        (
            "import torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)",
            "native thread(s)",
        ),
    ],
)
def test_an_unsafe_fork_is_recognised_with_its_reason(before: str, words: str) -> None:
    done = run(["-c", COMPUTE.format(before="torch.set_num_threads(2)\n" + before)])
    assert done.returncode == 7, done.stdout + done.stderr
    assert words in done.stdout


ASKED = """
import sys, torch
from fabric import Fabric
torch.cuda.is_available()
fabric = Fabric(accelerator=sys.argv[1], strategy="ddp", devices=2)
fabric.launch()
sys.stdout.write(f"{sys.argv[1]} {torch.cuda.is_available()} {fabric.all_reduce(1.0, reduce_op='sum')}\\n")
"""


@pytest.mark.slow
@pytest.mark.without_gpu
def test_devices_that_are_not_there_are_not_lost_in_a_fork() -> None:
    """Torch's CUDA build marks every later fork once it was asked for devices, and without a driver fabric's look too.
    `python -c` has no file to run again."""
    for accelerator in ("cpu", "auto"):
        done = run(["-c", ASKED, accelerator])
        assert done.stdout == f"{accelerator} False 2.0\n" * 2, done.stderr


JOINED = """
import threading
from fabric.launchers.fork import why_fork_is_unsafe
for _ in range(2000):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    reason = why_fork_is_unsafe()
    assert reason is None, reason
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_thread_that_was_joined_is_gone() -> None:
    """The kernel lists it a moment longer: here about once in seven times, on a busy machine more often."""
    done = run(["-W", "ignore", "-c", JOINED])
    assert done.returncode == 0, done.stdout + done.stderr


AFTER_A_FORK = """
import os, numpy, torch
from fabric.launchers.fork import why_fork_is_unsafe
assert why_fork_is_unsafe() is None, why_fork_is_unsafe()
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
assert why_fork_is_unsafe() is None, why_fork_is_unsafe()
(torch.randn(4_000_000) + 1).sum()
print(why_fork_is_unsafe())
"""


@pytest.mark.slow
def test_openmp_is_seen_after_a_fork_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_A_FORK], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
    )  # fmt: skip
    assert "native thread(s), which tensor operations have left behind" in done.stdout


KERNEL = """
import sys
from jupyter_client.manager import start_new_kernel

def show(message):
    content = message["content"]
    print(content.get("text") or content.get("evalue", ""), end="", flush=True)  # a line may come in pieces


manager, client = start_new_kernel(kernel_name="python3")
try:
    for cell in sys.argv[1:]:
        client.execute_interactive(cell, timeout=40, output_hook=show)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""
CELL = """
import torch
from fabric import Fabric

def total(fabric, more):
    return fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum").item() + more

fabric = Fabric(accelerator="cpu", strategy="ddp_notebook", devices=2)
print("first", fabric.launch(total, 10))
"""


@pytest.mark.slow
def test_a_notebook_launches_the_function_of_a_cell_again_and_again() -> None:
    cells = [CELL, "print('second', fabric.launch(total, 20))", "fabric.launch()"]
    done = subprocess.run([sys.executable, "-c", KERNEL, *cells], capture_output=True, text=True, timeout=100)
    assert "first 11.0" in done.stdout, done.stdout + done.stderr
    assert "second 21.0" in done.stdout, done.stdout
    assert "Pass what they do as a function" in done.stdout, done.stdout
