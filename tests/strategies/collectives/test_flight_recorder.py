"""The calls that torch has recorded, as read by a thread beside the program's."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import free_port, run

PROGRAM = """
import os, sys
from fabric.launchers.environments.defaults import recording
from fabric.strategies.collectives.flight_recorder import FlightRecorder
import torch
import torch.distributed as dist

with recording(os.environ):
    recorder = FlightRecorder()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
(call,) = recorder.calls(with_lines=True)
print(call.operation, repr(call.where), 'torch._dynamo' in sys.modules)
torch.optim.SGD([torch.ones(1)], lr=0.1)
(call,) = recorder.calls(with_lines=True)
print(os.path.basename(call.where))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_lines_are_read_once_dynamo_is_imported_and_never_import_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run([tmp_path / "program.py", str(free_port())], fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "all_reduce of float32 (2,) '' False",
        "program.py:11 in <module>",
    ]
