"""What a whole process costs: importing, launching 2 to 16 ranks up to their first barrier, ending, and verifying."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import rivals
from timing import Row, in_order, limited, rows

PYPI = str(Path(__file__).parents[2] / ".venv/device/bin/python")
"""Over PyPI's torch, with its CUDA build."""
_ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PRETENDED_DEVICES": "0"}

IMPORTS = {
    "raw": "import torch",
    "ours": "from fabric import Fabric",
    "LF": "from lightning_fabric import Fabric",
    "AC": "from accelerate import Accelerator",
}

# A program of one process: import, a model, AdamW, a loader, ten steps. Building AdamW makes torch import its compiler.
PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset
{begin}
model = torch.nn.Linear(32, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(80, 32), torch.randn(80, 1)), 8, shuffle=True)
{setup}
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    {backward}
    optimizer.step()
"""
PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
SETUP = "model, optimizer = fabric.setup(model, optimizer); loader = fabric.setup_dataloaders(loader)"
PROGRAMS = {
    "raw": PROGRAM.format(begin="", setup="", backward="loss.backward()"),
    "ours": PROGRAM.format(
        begin="from fabric import Fabric\nfabric = Fabric(accelerator='cpu', devices=1)\nfabric.launch()",
        setup=SETUP,
        backward="fabric.backward(loss)",
    ),
    "LF": PROGRAM.format(
        begin="from lightning_fabric import Fabric\nfabric = Fabric(accelerator='cpu', devices=1)\nfabric.launch()",
        setup=SETUP,
        backward="fabric.backward(loss)",
    ),
    "AC": PROGRAM.format(
        begin="from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)",
        setup=PREPARE,
        backward="accelerator.backward(loss)",
    ),
}

# Each script writes the moment of its first barrier, and that of its last line, as seen by the machine's clock.
OURS = """
import sys, time
import torch
from fabric import Fabric
devices = int(sys.argv[2]) if len(sys.argv) > 2 else 2
fabric = Fabric(accelerator="cpu", strategy="ddp", devices=devices)
fabric.launch()
fabric.barrier()
if fabric.is_global_zero:
    open(sys.argv[1], "w").write(f"{time.monotonic()} ")
fabric.close()
with open(f"{sys.argv[1]}.{fabric.global_rank}", "w") as file:
    file.write(str(time.monotonic()))
"""
ALONE = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
open(sys.argv[1], "w").write(f"{time.monotonic()} ")
dist.destroy_process_group()
for rank in range(2):
    with open(f"{sys.argv[1]}.{rank}", "w") as file:
        file.write(str(time.monotonic()))
"""
LIGHTNING = """
import sys, time
import torch
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
fabric.launch()
fabric.barrier()
if fabric.global_rank == 0:
    open(sys.argv[1], "w").write(f"{time.monotonic()} ")
with open(f"{sys.argv[1]}.{fabric.global_rank}", "w") as file:
    file.write(str(time.monotonic()))
"""
TORCHRUN = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(f"{time.monotonic()} ")
dist.destroy_process_group()
with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
    file.write(str(time.monotonic()))
"""


def imports(rounds: int = 7) -> list[Row]:
    """`import` of each library in a fresh interpreter, torch included."""
    return rows("import, whole process", _timed(IMPORTS, rounds), "1.05 x")


def programs(rounds: int = 7) -> list[Row]:
    """A small program of one process, from the start of its interpreter to its end."""
    return rows("10 steps, whole process", _timed(PROGRAMS, rounds), "1.05 x")


def launches(rounds: int = 5) -> list[Row]:
    """From the start of the command to the first barrier of two ranks; and from their last line to its end."""
    with tempfile.TemporaryDirectory() as folder:
        alone = [sys.executable, _write(folder, "alone.py", ALONE)]
        commands = {"ours": [sys.executable, _write(folder, "ours.py", OURS)]}
        if "LF" in rivals.installed():
            commands["LF"] = [sys.executable, _write(folder, "lf.py", LIGHTNING)]
        script = _write(folder, "raw.py", TORCHRUN)
        commands["torchrun"] = _torchrun(script, 2)
        up: dict[str, list[float]] = {name: [] for name in ("import torch", *commands)}
        down: dict[str, list[float]] = {name: [] for name in ("one process", *commands)}
        for _ in range(limited(rounds)):
            start = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            up["import torch"].append((time.monotonic() - start) * 1e6)
            _, last, end, _ = _stamps(alone, Path(folder) / "stamp")
            down["one process"].append((end - last) * 1e6)
            for name, command in commands.items():
                barrier, last, end, start = _stamps(command, Path(folder) / "stamp")
                up[name].append((barrier - start) * 1e6)
                down[name].append((end - last) * 1e6)
    return rows("launch of 2 ranks to the first barrier", up, "1.3 x + 0.3 s") + rows(
        "end after the last line", down, "+0.2 s"
    )


def start(rounds: int = 5) -> list[Row]:
    """Two ranks up to their first barrier, over two imports of torch one after the other; and a program of one process.
    Over the torch of this environment, and over PyPI's CUDA build where `make device` has installed it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        program, stamp = _write(folder, "ours.py", OURS), Path(folder) / "stamp"
        for python in [each for each in (sys.executable, PYPI) if Path(each).exists()]:
            says = [python, "-c", "import torch; print(torch.__version__)"]
            build = subprocess.run(says, check=True, capture_output=True, text=True, env=_ENVIRON).stdout.strip()
            times: dict[str, list[float]] = {"import torch twice": [], "ours": []}
            alone: dict[str, list[float]] = {"raw": [], "ours": []}
            for _ in range(limited(rounds)):
                times["import torch twice"].append(_seconds([python, "-c", IMPORTS["raw"]], 2) * 1e6)
                barrier, _, _, begun = _stamps([python, program], stamp)
                times["ours"].append((barrier - begun) * 1e6)
                for name, mine in alone.items():
                    mine.append(_seconds([python, "-c", PROGRAMS[name]]) * 1e6)
            found += rows(f"torch {build}: 2 ranks to the first barrier", times, "0.9 x")
            found += rows(f"torch {build}: 10 steps, whole process", alone, "1.05 x")
    return found


def verify(rounds: int = 3) -> list[Row]:
    """`fabric verify` of five steps on two ranks, over the two plain runs that it compares; it has a third run."""
    with tempfile.TemporaryDirectory() as folder:
        seeded = PROGRAMS["ours"].replace(", devices=1)", "); torch.manual_seed(0)")
        program = _write(folder, "program.py", seeded)
        fabric = [sys.executable, "-m", "fabric"]
        one, two = ["--strategy", "single_device", "--devices", "1"], ["--strategy", "ddp", "--devices", "2"]
        times: dict[str, list[float]] = {"two runs": [], "ours": []}
        for _ in range(limited(rounds)):
            runs = [_seconds([*fabric, "run", *options, program]) for options in (one, two)]
            times["two runs"].append(sum(runs) * 1e6)
            times["ours"].append(_seconds([*fabric, "verify", "--steps", "5", *two, program]) * 1e6)
    return rows("verify a program of 5 steps on 2 ranks", times, "3 x")


def many_ranks(rounds: int = 3) -> list[Row]:
    """From the start of the command to the first barrier, for numbers of ranks that double."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        script, program = _write(folder, "raw.py", TORCHRUN), _write(folder, "ours.py", OURS)
        for size in (4, 8, 16):
            commands = {"torchrun": _torchrun(script, size), "ours": [sys.executable, program]}
            times: dict[str, list[float]] = {name: [] for name in commands}
            for turn in range(limited(rounds)):
                for name, command in in_order(commands, turn):
                    barrier, _, _, start = _stamps(command, Path(folder) / "stamp", str(size))
                    times[name].append((barrier - start) * 1e6)
            found += rows(f"launch of {size} ranks to the first barrier", times)
    return found


def _timed(scripts: dict[str, str], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in scripts if name in ("raw", "ours", *rivals.installed())}
    for _ in range(limited(rounds)):
        for name, mine in times.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", scripts[name]], check=True, stderr=subprocess.DEVNULL)
            mine.append((time.perf_counter() - start) * 1e6)
    return times


def _seconds(command: list[str], times: int = 1) -> float:
    begun = time.monotonic()
    for _ in range(times):
        subprocess.run(command, check=True, env=_ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - begun


def _torchrun(script: str, size: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", script]


def _write(folder: str, name: str, content: str) -> str:
    path = Path(folder) / name
    path.write_text(content)
    return str(path)


def _stamps(command: list[str], stamp: Path, *args: str) -> tuple[float, float, float, float]:
    start = time.monotonic()
    subprocess.run(
        [*command, str(stamp), *args], check=True, env=_ENVIRON, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    end = time.monotonic()
    barrier = float(stamp.read_text())
    last = max(float(Path(f"{stamp}.{rank}").read_text()) for rank in range(2))
    return barrier, last, end, start
