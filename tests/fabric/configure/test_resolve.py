"""`resolve` as a table: the words of a request and the numbers of a machine, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fabric.configure.machine import Found, Machine
from fabric.configure.request import Request
from fabric.configure.resolve import CONFLICTS, resolve
from fabric.launchers.process.program import Program
from fabric.launchers.world import Rendezvous, World
from fabric.strategies import DataParallelStrategy, DDPStrategy, Precision, SingleDeviceStrategy, XLAStrategy
from fabric.strategies.accelerators import CPUAccelerator, TorchAccelerator
from fabric.strategies.accelerators.xla import XLAAccelerator


def machine(cuda: int = 0, mps: int = 0, **fields: Any) -> Machine:
    """A machine from numbers."""
    found = [Found(accelerator=CPUAccelerator(), num_devices=1)]
    for name, number in (("cuda", cuda), ("mps", mps)):
        missing = None if number else f"No {name} in this machine."
        found.append(Found(accelerator=TorchAccelerator(name), num_devices=number, why_unavailable=missing))
    kind = fields.pop("program", "script")
    program = Program(flags=(), kind=kind, target="train.py", arguments=())
    return Machine(found=tuple(found), program=program, **fields)


def tpu(number: int, platform: str = "TPU") -> Machine:
    """A machine with devices of XLA."""
    found = Found(accelerator=XLAAccelerator(), num_devices=number, platform=platform)
    return Machine(found=(*machine().found, found))


def started_by(launcher: str, size: int, *, num_nodes: int = 1, rank: int = 0, cuda: int = 0, **fields: Any) -> Machine:
    """A machine on which a launcher started `size` processes, as many on each node."""
    local = size // num_nodes
    world = World(
        rank=rank,
        size=size,
        local_rank=rank % local,
        local_size=local,
        node_rank=rank // local,
        num_nodes=num_nodes,
        rendezvous=Rendezvous(address="10.0.0.1", port=1, hosted=True) if size > 1 else None,
        launcher=launcher,
    )
    return machine(cuda, world=world, variables=(f"WORLD_SIZE={size}", f"LOCAL_WORLD_SIZE={local}"), **fields)


@dataclass(frozen=True)
class Row:
    """Arguments on a machine, and the outcome: fields of the `Resolved`, or a fragment of the error."""

    arguments: dict[str, Any]
    here: Machine = field(default_factory=machine)
    expected: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def __repr__(self) -> str:
        arguments = ",".join(f"{name}={value}" for name, value in self.arguments.items()) or "nothing"
        devices = "+".join(f"{found.num_devices}{found.accelerator.name}" for found in self.here.usable())
        world = self.here.world
        around = f"{world.launcher}{world.size}" if world is not None else self.here.program.kind
        return f"{arguments}-on-{devices}-{around}"


NODE_1 = {"num_nodes": 2, "node_rank": 1, "main_address": "10.0.0.1", "main_port": 29500}

CHOSEN = [
    # No arguments: one process on the CPU, every device elsewhere
    Row(
        {}, machine(), {"strategy": SingleDeviceStrategy(), "accelerator": "cpu", "devices": (0,), "launcher": "inline"}
    ),
    Row({}, machine(cuda=1), {"strategy": SingleDeviceStrategy(), "accelerator": "cuda", "devices": (0,)}),
    Row({}, machine(cuda=4), {"strategy": DDPStrategy(), "devices": (0, 1, 2, 3), "launcher": "auto"}),
    Row({}, machine(mps=1), {"strategy": SingleDeviceStrategy(), "accelerator": "mps", "launcher": "inline"}),
    # Accelerators
    Row({"accelerator": "cpu"}, machine(cuda=4), {"accelerator": "cpu", "devices": (0,), "size": 1}),
    Row({"accelerator": CPUAccelerator()}, machine(cuda=4), {"accelerator": "cpu"}),
    Row({"accelerator": "cuda"}, machine(cuda=2), {"accelerator": "cuda", "devices": (0, 1)}),
    Row({"accelerator": TorchAccelerator("cuda")}, machine(cuda=2), {"accelerator": "cuda", "size": 2}),
    # Devices
    Row({"devices": 1}, machine(cuda=4), {"strategy": SingleDeviceStrategy(), "devices": (0,), "launcher": "inline"}),
    Row({"devices": 2}, machine(cuda=4), {"strategy": DDPStrategy(), "devices": (0, 1), "size": 2}),
    Row({"devices": "all"}, machine(cuda=4), {"devices": (0, 1, 2, 3)}),
    Row({"devices": (1, 3)}, machine(cuda=4), {"strategy": DDPStrategy(), "devices": (1, 3), "size": 2}),
    Row({"devices": (2,)}, machine(cuda=4), {"strategy": SingleDeviceStrategy(), "devices": (2,), "size": 1}),
    Row({"devices": (3, 0)}, machine(cuda=4), {"devices": (3, 0)}),
    Row({"devices": 2}, machine(), {"strategy": DDPStrategy(), "accelerator": "cpu", "size": 2}),
    Row({"devices": 64}, machine(), {"strategy": DDPStrategy(), "size": 64}),
    Row({"accelerator": "cpu", "devices": 3}, machine(cuda=2), {"accelerator": "cpu", "size": 3}),
    # Strategies
    Row({"strategy": "single_device"}, machine(cuda=4), {"strategy": SingleDeviceStrategy(), "devices": (0,)}),
    Row({"strategy": "ddp"}, machine(), {"strategy": DDPStrategy(), "size": 1, "launcher": "inline"}),
    Row({"strategy": "ddp"}, machine(cuda=4), {"size": 4}),
    Row({"strategy": "dp"}, machine(cuda=4), {"devices": (0, 1, 2, 3), "size": 1, "launcher": "inline"}),
    Row({"strategy": "dp", "devices": 2}, machine(cuda=4), {"strategy": DataParallelStrategy(), "devices": (0, 1)}),
    Row({"strategy": "ddp_spawn", "devices": 2}, machine(), {"launcher": "spawn", "size": 2}),
    Row({"strategy": "ddp_fork", "devices": 2}, machine(), {"launcher": "fork"}),
    Row({"strategy": "ddp_notebook", "devices": 2}, machine(program="notebook"), {"launcher": "fork"}),
    Row(
        {"strategy": "ddp_find_unused_parameters_true", "devices": 2},
        machine(),
        {"strategy": DDPStrategy(find_unused_parameters=True), "launcher": "auto"},
    ),
    Row({"strategy": DDPStrategy(bucket_bytes=1), "devices": 2}, machine(), {"strategy": DDPStrategy(bucket_bytes=1)}),
    Row({"strategy": DDPStrategy(launcher="spawn"), "devices": 2}, machine(), {"launcher": "spawn"}),
    # What is installed is what the machine says, whatever is installed here
    Row({"strategy": "deepspeed", "devices": 2}, machine(packages={"deepspeed": "0.19.9"}), {"size": 2}),
    Row({"strategy": "ddp_fully_sharded", "devices": 2}, machine(packages={"fairscale": "0.4.13"}), {"size": 2}),
    Row({"strategy": "horovod", "devices": 2}, machine(packages={"horovod": "gloo"}), {"size": 2}),
    Row({"accelerator": "xla"}, tpu(4), {"strategy": XLAStrategy(), "size": 4, "launcher": "xla"}),
    Row({"accelerator": "xla", "strategy": "xla_fsdp"}, tpu(4, platform="CPU"), {"size": 1}),
    # Precision
    Row({"precision": Precision.parse("bf16")}, machine(), {"precision": Precision.parse("bf16-mixed")}),
    Row({"precision": Precision.parse(64), "accelerator": "cpu"}, machine(mps=1), {"accelerator": "cpu"}),
    # Launchers
    Row({"devices": 2, "launcher": "fork"}, machine(), {"launcher": "fork"}),
    Row({"devices": 2, "launcher": "script"}, machine(), {"launcher": "script"}),
    Row({"devices": 2, "launcher": "elastic"}, machine(), {"launcher": "elastic", "max_restarts": 3}),
    Row({"devices": 2, "max_restarts": 0}, machine(), {"launcher": "elastic", "max_restarts": 0}),
    Row({"devices": 2, "timeout_seconds": 30.0}, machine(), {"strategy": DDPStrategy(timeout_seconds=30.0)}),
    Row({"devices": 1, "timeout_seconds": 30.0}, machine(), {"strategy": SingleDeviceStrategy()}),
    Row({"launcher": "elastic"}, machine(), {"launcher": "elastic", "size": 1}),
    Row({"max_restarts": 2, "devices": 2}, started_by("elastic", 2), {"launcher": "external", "size": 2}),
    Row({"devices": 2, "launcher": "forkserver"}, machine(program="interactive"), {"launcher": "forkserver"}),
    Row({"devices": 2, "launcher": "spawn"}, machine(), {"launcher": "spawn"}),
    Row({"devices": 2, "launcher": "spawn", "strategy": "ddp_spawn"}, machine(), {"launcher": "spawn"}),
    Row({"devices": 2}, machine(program="notebook"), {"launcher": "auto"}),
    Row({"launcher": "spawn"}, machine(), {"launcher": "inline", "size": 1}),
    # Several nodes
    Row(NODE_1, machine(), {"strategy": DDPStrategy(), "size": 2, "num_nodes": 2, "node_rank": 1, "devices": (0,)}),
    Row({**NODE_1, "devices": 3}, machine(), {"size": 6, "main_address": "10.0.0.1", "main_port": 29500}),
    Row(NODE_1, machine(cuda=2), {"size": 4, "node_rank": 1, "main_port": 29500}),
    # A world in the environment is the truth
    Row({}, started_by("torchelastic", 2), {"strategy": DDPStrategy(), "size": 2, "launcher": "external"}),
    Row({}, started_by("torchelastic", 1), {"strategy": SingleDeviceStrategy(), "launcher": "external"}),
    Row({}, started_by("torchelastic", 1, cuda=4), {"devices": (0,), "size": 1}),
    Row({}, started_by("torchelastic", 2, cuda=4), {"devices": (0, 1), "size": 2}),
    Row({}, started_by("torchelastic", 4, cuda=4), {"devices": (0, 1, 2, 3)}),
    Row({"strategy": "dp"}, started_by("torchelastic", 1, cuda=4), {"devices": (0, 1, 2, 3), "size": 1}),
    Row({"strategy": "ddp"}, started_by("torchelastic", 1, cuda=4), {"devices": (0,), "size": 1}),
    Row({"devices": 2}, started_by("torchelastic", 2), {"size": 2}),
    Row({"devices": (2, 3)}, started_by("torchelastic", 2, cuda=4), {"devices": (2, 3)}),
    Row({"launcher": "external"}, started_by("torchelastic", 2), {"launcher": "external"}),
    Row({}, started_by("torchelastic", 4, num_nodes=2, rank=2), {"num_nodes": 2, "node_rank": 1, "size": 4}),
    Row({"num_nodes": 2, "devices": 2}, started_by("slurm", 4, num_nodes=2), {"num_nodes": 2, "size": 4}),
    Row({"num_nodes": 1}, started_by("slurm", 4, num_nodes=2), {"num_nodes": 2}),
    Row({}, started_by("slurm", 4, rank=3, cuda=1), {"devices": (0, 0, 0, 0), "size": 4}),
    Row({"devices": 4}, started_by("slurm", 4, cuda=1), {"devices": (0, 0, 0, 0)}),
    Row({}, started_by("local", 2), {"strategy": DDPStrategy(), "size": 2}),
    Row({}, started_by("torchelastic", 2, program="notebook"), {"launcher": "external"}),
    # One device is all that each node of the world has
    Row({"devices": 1}, started_by("slurm", 2, num_nodes=2, has_met_others=True), {"size": 2, "num_nodes": 2}),
    # A second Fabric within a rank of ours
    Row({}, started_by("fork", 2), {"strategy": DDPStrategy(), "size": 2, "launcher": "external"}),
    Row({"devices": 2, "launcher": "script"}, started_by("script", 2), {"launcher": "external", "size": 2}),
    Row({"devices": 2, "strategy": "ddp_spawn"}, started_by("spawn", 2), {"launcher": "external"}),
    Row({**NODE_1, "devices": 2}, started_by("script", 4, num_nodes=2, rank=2), {"node_rank": 1, "size": 4}),
]

REFUSED = [
    # What is installed is what the machine says, whatever is installed here
    Row({"strategy": "deepspeed"}, machine(), error="needs the package deepspeed, which is not installed"),
    Row({"strategy": "deepspeed"}, machine(packages={"deepspeed": "0.18.3"}), error="and 0.18.3 is installed"),
    Row({"strategy": "ddp_sharded"}, machine(), error="the package `fairscale` is not installed"),
    Row({"strategy": "horovod"}, machine(packages={"horovod": "nccl"}), error="needs Horovod with its gloo controller"),
    Row({"strategy": "horovod"}, machine(2, packages={"horovod": "gloo"}), error="with `accelerator='cuda'`"),
    Row({"strategy": "xla"}, machine(), error="needs torch-xla, which is not installed"),
    Row({"strategy": "xla"}, machine(packages={"torch_xla": "2.9"}), error="but the accelerator is 'cpu'"),
    Row({"accelerator": "xla", "devices": 2}, tpu(4), error="but PJRT has 4 devices here"),
    Row({"accelerator": "xla", "devices": 4}, tpu(4, platform="CPU"), error="torch_xla 2.9 hangs there"),
    # Accelerators
    Row({"accelerator": "cuda"}, error="`accelerator='cuda'` cannot be used here. No cuda in this machine. Here: cpu."),
    Row({"accelerator": "mps"}, machine(cuda=2), error="No mps in this machine. Here: cuda, cpu."),
    Row({"accelerator": TorchAccelerator("cuda")}, error="`accelerator='cuda'` cannot be used here"),
    # Devices
    Row({"devices": 5}, machine(cuda=4), error="`devices=5` asks for 5 devices of `accelerator='cuda'`, but this"),
    Row(
        {"devices": (1, 4)}, machine(cuda=4), error="asks for device 4 of `accelerator='cuda'`, but this process sees 4"
    ),
    Row({"devices": 2}, machine(mps=1), error="this process sees 1 mps device. Write fewer, or `devices='auto'`"),
    Row({"devices": "all"}, error="`devices=-1` selects devices, but `accelerator='cpu'` is one device"),
    Row({"devices": (0, 1)}, error="`devices=[0, 1]` selects devices, but `accelerator='cpu'` is one device"),
    # Strategies
    Row({"strategy": "single_device", "devices": 2}, error="`strategy='single_device'` uses one device"),
    Row({"strategy": "single_device", "devices": 2}, machine(cuda=4), error="Pass `devices=1`, or `strategy='ddp'`"),
    Row({"strategy": "single_device", **NODE_1}, error="`num_nodes=2` make"),
    Row({"strategy": "dp", "devices": 2}, error="Pass `strategy='ddp'` for 2 processes."),
    Row({"strategy": "dp", **NODE_1}, machine(cuda=2), error="`strategy='dp'` is one process, but `num_nodes=2`"),
    Row({"strategy": "dpp"}, error="`strategy='dpp'` is not known. Did you mean 'dp'? "),
    Row(
        {"strategy": "ddp", "accelerator": "mps", **NODE_1}, machine(mps=1), error="`accelerator='mps'` has one device"
    ),
    # Precision
    Row({"precision": Precision.parse(64)}, machine(mps=1), error="`precision='64-true'` needs float64, which"),
    # Launchers
    Row({"launcher": "external"}, error="the environment has no variables of one. Looked for: RANK, WORLD_SIZE"),
    Row({"launcher": "script"}, machine(program="notebook"), error="but this is a notebook and has no file."),
    Row({"launcher": "script"}, machine(program="command"), error="but this is `python -c` and has no"),
    Row({"launcher": "script"}, machine(program="interactive"), error="an interactive session and has no file. Write "),
    Row(
        {"strategy": "ddp_spawn", "launcher": "fork", "devices": 2},
        error="`strategy='ddp_spawn'` starts its processes by 'spawn', but `launcher='fork'` was written.",
    ),
    Row(
        {"strategy": DDPStrategy(launcher="fork"), "launcher": "script"},
        error="`strategy=DDPStrategy(...)` starts its processes by 'fork', but `launcher='script'` was written. Choose "
        "one of the two, or a strategy that leaves the launcher open, such as 'ddp'.",
    ),
    Row(
        {"strategy": DDPStrategy(timeout_seconds=60), "timeout_seconds": 30.0, "devices": 2},
        error="`timeout_seconds=30`, but `strategy=DDPStrategy(...)` has no `timeout_seconds`, or another one already.",
    ),
    Row({"max_restarts": 2, "launcher": "fork"}, error="but `launcher='fork'`. Leave one of them out, or start each"),
    Row(
        {"max_restarts": 2},
        started_by("torchelastic", 2),
        error="are for ranks that fabric starts on one node, but torchelastic started 2 processes (2 on this node; ",
    ),
    Row({"launcher": "elastic", **NODE_1}, error="for ranks that fabric starts on one node, but `num_nodes=2`. Leave"),
    Row({"max_restarts": 2, **NODE_1}, error="or start each node with `torchrun --nnodes N --max-restarts M"),
    Row({"strategy": "ddp_spawn", "launcher": "elastic"}, error="by 'spawn', but `launcher='elastic'` was written."),
    Row({"strategy": "ddp_spawn", "max_restarts": 1}, error="by 'spawn', but `--max-restarts` by 'elastic'. Choose"),
    # Several nodes
    Row({"num_nodes": 2}, error="missing: --node-rank, --main-address, --main-port. On each node, run"),
    Row({"num_nodes": 3, "node_rank": 0}, error="`fabric run --num-nodes 3 --node-rank N --main-address HOST"),
    Row({"num_nodes": 2, "main_address": "a", "main_port": 5}, error="missing: --node-rank. On each"),
    Row({**NODE_1, "node_rank": 2}, error="`--node-rank 2` with `num_nodes=2`: nodes count from 0 to 1."),
    Row({"node_rank": 1}, error="`--node-rank 1` is for several nodes that fabric starts, but `num_nodes=1`. Add"),
    Row({"main_port": 5}, error="`--main-port 5` is for several nodes that fabric starts, but `num_nodes=1`."),
    # A world in the environment is the truth
    Row(
        {"devices": 1},
        started_by("torchelastic", 2),
        error="ask for 1 process on this node, but torchelastic started 2 processes (2 on this node; read: "
        "WORLD_SIZE=2, LOCAL_WORLD_SIZE=2). Leave `devices` out, write a strategy for several processes, such as "
        "'ddp', or start 1.",
    ),
    Row(
        {"devices": 3},
        started_by("torchelastic", 2),
        error="ask for 3 processes on this node, but torchelastic started",
    ),
    Row(
        {"devices": 2}, started_by("slurm", 1), error="ask for 2 processes on this node, but slurm started 1 process ("
    ),
    Row(
        {"devices": 2},
        started_by("local", 1),
        error="no launch by hand is meant, `unset WORLD_SIZE LOCAL_WORLD_SIZE",
    ),
    Row({"devices": 2}, started_by("slurm", 4, num_nodes=1, cuda=4), error="but slurm started 4 processes"),
    Row({"devices": "all"}, started_by("torchelastic", 2, cuda=4), error="ask for 4 processes on this node"),
    Row({"devices": 3}, started_by("slurm", 4, cuda=1), error="ask for 3 processes on this node, but slurm started 4"),
    Row({"num_nodes": 2}, started_by("torchelastic", 4), error="`num_nodes=2` was written, but torchelastic started 4"),
    Row(
        {"num_nodes": 3}, started_by("slurm", 4, num_nodes=2), error="on 2 nodes. Leave `num_nodes` out, or start it on"
    ),
    Row(
        {"strategy": "single_device"},
        started_by("torchelastic", 2),
        error="`strategy='single_device'` ask for 1 process on this node, but torchelastic",
    ),
    Row(
        {"strategy": "single_device"}, started_by("slurm", 2, num_nodes=2), error="`strategy='single_device'` uses one"
    ),
    Row(
        {"strategy": "dp"},
        started_by("torchelastic", 2, cuda=4),
        error="write a strategy for several processes, such as 'ddp', or start 1.",
    ),
    Row(
        {"launcher": "spawn"},
        started_by("torchelastic", 2),
        error="`launcher='spawn'` starts processes, but torchelastic",
    ),
    Row({"launcher": "fork"}, started_by("slurm", 1), error="`launcher='fork'` starts processes, but slurm started 1"),
    Row(
        {"strategy": "ddp_spawn"},
        started_by("torchelastic", 2),
        error="`strategy='ddp_spawn'` starts its processes by 'spawn', but torchelastic started 2 processes",
    ),
    Row(
        {"log_dir": "/tmp/logs"},
        started_by("torchelastic", 2),
        error="`log_dir='/tmp/logs'` is for ranks that fabric starts, but torchelastic started 2",
    ),
    Row({"prefix_output": True}, started_by("slurm", 2), error="`prefix_output=True` is for ranks that fabric starts"),
    Row({"stop_grace_seconds": 300}, started_by("slurm", 2), error="`stop_grace_seconds=300` is for ranks that fabric"),
    Row(
        {"node_rank": 0},
        started_by("slurm", 2),
        error="`--node-rank 0` is for several nodes that fabric starts, but slurm started 2",
    ),
    Row(
        {},
        started_by("torchelastic", 4, cuda=2),
        error="This process sees 2 cuda devices, but torchelastic started 4 processes (4 on",
    ),
    Row(
        {},
        started_by("torchelastic", 2, cuda=1),
        error="): a rank would have none of its own. Start at most 1 per node, or",
    ),
    Row({"devices": 2}, started_by("torchelastic", 2, cuda=1), error="`devices=2` asks for 2 devices of"),
    # A second Fabric within a rank of ours
    Row(
        {"devices": 3},
        started_by("fork", 2, rank=1),
        error="ask for 3 processes on this node, but this process is rank 1 of the 2 that an earlier `launch()` "
        "started by 'fork' (2 on this node).",
    ),
    Row(
        {"devices": 1, "strategy": "ddp"},
        started_by("script", 2),
        error="ask for 1 process on this node, but this process is rank 0 of",
    ),
    Row({"launcher": "spawn"}, started_by("fork", 2), error="`launcher='spawn'` starts processes, but this process is"),
    Row({"strategy": "ddp_spawn"}, started_by("fork", 2), error="starts its processes by 'spawn', but this process is"),
]


@pytest.mark.parametrize("row", CHOSEN, ids=repr)
def test_supported_requests_resolve_to_their_configuration(row: Row) -> None:
    chosen = resolve(Request(**row.arguments), row.here)
    found = {
        "strategy": chosen.strategy,
        "accelerator": chosen.accelerator.name,
        "devices": chosen.devices,
        "precision": chosen.precision,
        "launcher": chosen.launcher,
        "max_restarts": chosen.max_restarts,
        "num_nodes": chosen.topology.num_nodes,
        "size": chosen.topology.size,
        "node_rank": chosen.topology.node_rank,
        "main_address": chosen.topology.main_address,
        "main_port": chosen.topology.main_port,
    }
    assert {name: found[name] for name in row.expected} == row.expected
    assert chosen.world == row.here.world
    assert chosen.strategy.num_processes(len(chosen.devices)) == chosen.topology.num_processes


ALONE = [
    Row({"devices": 1}, started_by("fork", 2, rank=1), {"devices": (0,)}),
    Row({"devices": 1}, started_by("script", 4, num_nodes=2), {"devices": (0,)}),
    Row({"devices": 1}, started_by("torchelastic", 2, has_met_others=True), {"devices": (0,)}),
    Row({"devices": 1, "strategy": "single_device"}, started_by("slurm", 2, num_nodes=2, has_met_others=True)),
    Row({"devices": 1, "strategy": SingleDeviceStrategy()}, started_by("elastic", 2)),
    Row({"devices": 1}, started_by("fork", 4, rank=2, cuda=4), {"devices": (2,)}),
    Row({"devices": 1}, started_by("fork", 4, rank=2, cuda=8, current_device=6), {"devices": (6,)}),
    Row({"devices": 1}, started_by("slurm", 4, rank=2, cuda=1, has_met_others=True), {"devices": (0,)}),
    Row({"devices": (3,)}, started_by("fork", 4, rank=2, cuda=4), {"devices": (3,)}),
]


@pytest.mark.parametrize("row", ALONE, ids=repr)
def test_one_device_inside_a_rank_is_a_world_of_its_own(row: Row) -> None:
    chosen = resolve(Request(**row.arguments), row.here)
    assert chosen.world is None
    assert (chosen.topology.size, chosen.launcher, chosen.strategy) == (1, "inline", SingleDeviceStrategy())
    assert chosen.devices == row.expected.get("devices", (0,))


@pytest.mark.parametrize("row", REFUSED, ids=repr)
def test_unsupported_requests_raise_with_their_error(row: Row) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the words are compared below
        resolve(Request(**row.arguments), row.here)
    assert row.error in str(raised.value)


def test_every_conflict_has_a_row_that_raises_it() -> None:
    met = {
        next((conflict for conflict in CONFLICTS if conflict(Request(**row.arguments), row.here) is not None), None)
        for row in REFUSED
    }
    assert met >= set(CONFLICTS)


def test_no_conflict_refuses_a_supported_request() -> None:
    for row in CHOSEN:
        assert [conflict(Request(**row.arguments), row.here) for conflict in CONFLICTS] == [None] * len(CONFLICTS), row


def test_the_same_request_and_machine_give_the_same_configuration() -> None:
    here = machine(cuda=4)
    assert resolve(Request(devices=2), here) == resolve(Request(devices=2), replace(here))
