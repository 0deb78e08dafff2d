"""Pairs of arguments that contradict each other, or an argument that contradicts the machine, each with its error.

`resolve` checks them in the order of `CONFLICTS` and raises the first error. Checks that need more than a pair (do
these devices exist, can this strategy use them) are in `resolve` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.launchers.environments import ENVIRONMENTS
from fabric.launchers.registry import OURS, PER_DEVICE, launcher_row
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy

Conflict: TypeAlias = Callable[[Request, Machine], str | None]

_LOOKED_FOR = ", ".join(words for environment in ENVIRONMENTS if (words := environment.looked_for))
_PLACE_OPTIONS = {"node_rank": "--node-rank", "main_address": "--main-address", "main_port": "--main-port"}
_PLACE_VARIABLES = {"node_rank": "NODE_RANK", "main_address": "MASTER_ADDR", "main_port": "MASTER_PORT"}


def launcher_against_the_world(request: Request, machine: Machine) -> str | None:
    """`launcher='external'` where no launcher has started the processes; one that starts them where they exist."""
    world = machine.world
    if request.launcher == "external" and world is None:
        return (
            f"`launcher='external'` means that another program starts the processes, but the environment has no "
            f"variables of one. Looked for: {_LOOKED_FOR}. Start the script with torchrun or srun, or leave `launcher` "
            "out."
        )
    if world is None or request.launcher in ("auto", "external", world.launcher):
        return None
    return (
        f"`launcher={request.launcher!r}` starts processes, but {describe_world(machine)}. Leave `launcher` out, or "
        f"write `launcher='external'`."
    )


def nodes_against_the_world(request: Request, machine: Machine) -> str | None:
    """Another number of nodes than the world has. One is the default, and contradicts nothing."""
    world = machine.world
    if world is None or request.num_nodes in (1, world.num_nodes):
        return None
    return (
        f"`num_nodes={request.num_nodes}` was written, but {describe_world(machine)}, on {world.num_nodes} "
        f"node{'s' * (world.num_nodes > 1)}. Leave `num_nodes` out, or start it on {request.num_nodes} nodes."
    )


def output_against_a_foreign_world(request: Request, machine: Machine) -> str | None:
    """Options for the output of ranks that another launcher has started."""
    written = f"log_dir={request.log_dir!r}" if request.log_dir is not None else "prefix_output=True"
    if (
        machine.world is None
        or machine.world.launcher in OURS
        or (request.log_dir is None and not request.prefix_output)
    ):
        return None
    return (
        f"`{written}` is for ranks that fabric starts, but {describe_world(machine)}, which owns their output. Leave "
        "it out, and use that launcher's own options, such as `srun --output=rank-%t.log` or `torchrun --log-dir`."
    )


def place_of_a_node(request: Request, machine: Machine) -> str | None:
    """Node rank and address of node 0: where they are not needed, missing, given twice, or out of range."""
    options = ((option, getattr(request, name)) for name, option in _PLACE_OPTIONS.items())
    written = " ".join(f"{option} {value}" for option, value in options if value is not None)
    if machine.world is not None:
        if machine.world.launcher in OURS or not written:
            return None
        return (
            f"`{written}` sets the rank or address of a node, but {describe_world(machine)}, which sets them. Leave it "
            "out."
        )
    nodes = request.num_nodes
    if nodes == 1:
        if not written:
            return None
        return f"`{written}` is for several nodes, but `num_nodes=1`. Add `--num-nodes`, or leave it out."
    places = {name: (getattr(request, name), getattr(machine, name)) for name in _PLACE_OPTIONS}
    for name, (typed, found) in places.items():
        if typed is not None and found is not None and typed != found:
            return (
                f"`{_PLACE_OPTIONS[name]} {typed}` was written, but `{_PLACE_VARIABLES[name]}={found}` is in the "
                "environment. Leave one of them out."
            )
    missing = [name for name, place in places.items() if place == (None, None)]
    if missing:
        return (
            f"`num_nodes={nodes}` needs the rank of this node and the address and port of node 0; missing: "
            f"{', '.join(f'{_PLACE_OPTIONS[name]} ({_PLACE_VARIABLES[name]})' for name in missing)}. On each node, run "
            f"`fabric run --num-nodes {nodes} --node-rank N --main-address HOST --main-port 29500 SCRIPT`, N from 0 to "
            f"{nodes - 1} and HOST being node 0; or set the variables; or start it with torchrun or srun."
        )
    rank = next(each for each in places["node_rank"] if each is not None)
    if rank < nodes:
        return None
    return (
        f"This node's rank is {rank}, but with `num_nodes={nodes}` ranks of nodes are 0 to {nodes - 1}. Give each node "
        "a different rank in that range."
    )


def launcher_against_the_program(request: Request, machine: Machine) -> str | None:
    """A launcher that this program, or this system, cannot use."""
    if machine.world is not None or request.launcher not in OURS:
        return None
    return launcher_row(request.launcher).why_not(machine.program)


def restarts_that_no_launcher_makes(request: Request, machine: Machine) -> str | None:
    """Restarts by another launcher than 'elastic', or of several nodes, between which our supervisors do not agree."""
    written, world = request.max_restarts, machine.world
    if world is not None:
        if written is None or world.launcher in OURS:
            return None
        return (
            f"`--max-restarts {written}` restarts ranks, but {describe_world(machine)}: only {world.launcher} can "
            "restart them. Set the number of restarts there, and leave it out here."
        )
    if written is not None and request.launcher not in ("auto", "elastic"):
        return (
            f"`--max-restarts {written}` and `launcher={request.launcher!r}`: only 'elastic' restarts ranks. Leave one "
            "of them out."
        )
    if request.num_nodes == 1 or (written is None and request.launcher != "elastic"):
        return None
    return (
        f"`num_nodes={request.num_nodes}` and `launcher='elastic'`: it restarts the ranks of one node only. Start each "
        f"node with `torchrun --nnodes {request.num_nodes} --max-restarts N --rdzv-backend c10d ...`."
    )


CONFLICTS: tuple[Conflict, ...] = (
    launcher_against_the_world,
    nodes_against_the_world,
    output_against_a_foreign_world,
    restarts_that_no_launcher_makes,
    place_of_a_node,
    launcher_against_the_program,
)


def strategy_against_the_launcher(strategy: Strategy, word: str, request: Request, machine: Machine) -> str | None:
    """The strategy needs another launcher than the requested one, or than the one that started this process."""
    own = [launcher for launcher in strategy.launchers if launcher != "inline"]
    if not own or set(own) == set(PER_DEVICE):
        return None
    ways = " or ".join(map(repr, own))
    # XLA has no such strategy: its replicas have one launcher.
    another = "" if strategy.marks_steps else ", or write a strategy that leaves the launcher open, such as 'ddp'"
    if machine.world is not None and machine.world.launcher not in own:
        return (
            f"`strategy={word}` starts its processes by {ways}, but {describe_world(machine)}. Start the script by "
            f"itself{another}."
        )
    if request.launcher in OURS and request.launcher not in own:
        return (
            f"`strategy={word}` starts its processes by {ways}, but `launcher={request.launcher!r}` was written. Leave "
            f"`launcher` out{another}."
        )
    if request.max_restarts is not None and machine.world is None:
        return (
            f"`strategy={word}` starts its processes by {ways}, and `--max-restarts {request.max_restarts}` by "
            f"'elastic'. Leave it out{another}."
        )
    return None


def sanitize_against_the_strategy(strategy: Strategy, word: str, request: Request) -> str | None:
    """Steps that a device records are not compared: reading a number would end the graph."""
    if request.sanitize in ("start", False) or not strategy.marks_steps:
        return None
    return (
        f"`sanitize={request.sanitize!r}` reads weights and gradients in a step, and `strategy={word}` records steps "
        "and runs each as one graph. Leave `sanitize` out, or write a strategy on CPU or CUDA, such as 'ddp'."
    )


def accelerator_against_the_precision(accelerator: Accelerator, precision: Precision) -> str | None:
    """A dtype that the device lacks. Source: Metal has no double; torch raises "doesn't support float64"."""
    if accelerator.name != "mps" or precision.name != "64-true":
        return None
    return (
        "`precision='64-true'` needs float64, which `accelerator='mps'` does not have. Write `precision='32-true'`, or "
        "`accelerator='cpu'`."
    )


def accelerator_against_the_strategy(accelerator: Accelerator, strategy: Strategy, word: str) -> str | None:
    """A device that needs steps to be marked, with a strategy that marks none; an option that torch does not support on
    this device."""
    if not accelerator.is_recorded:
        return None
    if strategy.activation_checkpointing_policy is not None:
        return (
            f"`activation_checkpointing_policy` with `accelerator={accelerator.name!r}`: torch's activation "
            "checkpointing does not support it (`torch.utils.checkpoint` raises AttributeError, torch 2.9). Leave it "
            "out, and call `torch_xla.utils.checkpoint.checkpoint` in the model's own forward."
        )
    if strategy.marks_steps:
        return None
    one, several = accelerator.auto_strategies
    return (
        f"`accelerator={accelerator.name!r}` records operations and runs them once a step is marked, and "
        f"`strategy={word}` marks none. Write `strategy={several!r}`, or {one!r} for one device."
    )


def describe_world(machine: Machine) -> str:
    """The world in the environment: its launcher, its size, and the variables that define it."""
    world = machine.world
    assert world is not None
    if world.launcher in OURS:
        return (
            f"this process is rank {world.rank} of the {world.size} that an earlier `launch()` started by "
            f"{world.launcher!r} ({world.local_size} on this node)"
        )
    read = f"; read: {', '.join(machine.variables)}" if machine.variables else ""
    processes = f"{world.size} process{'es' * (world.size > 1)}"
    return f"{world.launcher} started {processes} ({world.local_size} on this node{read})"
