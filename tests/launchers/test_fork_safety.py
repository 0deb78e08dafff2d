"""A fork is allowed exactly where the child can compute."""

from __future__ import annotations

import pytest
from processes import run

COMPUTE = """
import os, sys, torch
def compute():
    torch.set_num_threads(2)
    x = torch.randn(800, 800, requires_grad=True)
    ((x @ x) + torch.randn(800, 800)).sum().backward()
    torch.randn(4_000_000).add_(1).sum()

from fabric.launchers import fork_is_safe
{before}
reason = fork_is_safe()
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
        "torch.zeros(3) + 1",
        "model = torch.nn.Linear(4, 4); torch.optim.SGD(model.parameters())",
        "torch.cuda.is_available()",
        "import torch.distributed as dist; dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)",
    ],
)
def test_a_child_of_an_accepted_fork_computes(before: str) -> None:
    done = run(["-W", "ignore", "-c", COMPUTE.format(before=before)])
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
        ("torch.cuda.is_initialized = lambda: True", "the accelerator cuda is initialised in this process"),
    ],
)
def test_an_unsafe_fork_is_recognised_with_its_reason(before: str, words: str) -> None:
    done = run(["-W", "ignore", "-c", COMPUTE.format(before="torch.set_num_threads(2)\n" + before)])
    assert done.returncode == 7, done.stdout + done.stderr
    assert words in done.stdout
