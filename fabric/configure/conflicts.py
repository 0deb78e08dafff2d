"""Pairs of arguments that contradict each other, or an argument that contradicts the machine, each with its error.

`resolve` checks them in the order of `CONFLICTS` and raises the first error. Checks that need more than a pair (do
these devices exist, can this strategy use them) are in `resolve` itself.
"""

from collections.abc import Callable
from typing import TypeAlias

from fabric.configure.machine import Machine
from fabric.configure.request import Request
from fabric.launchers.environments import ENVIRONMENTS
from fabric.launchers.launcher_names import OURS, PER_DEVICE, launcher_row
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy

Conflict: TypeAlias = Callable[[Request, Machine], str | None]

_LOOKED_FOR = ", ".join(words for environment in ENVIRONMENTS if (words := environment.looked_for))


def launcher_against_the_world(request: Request, machine: Machine) -> str | None:
    """`launcher='external'` without an external launcher, or a launcher that starts processes where they exist."""
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
    """A number of nodes that differs from the world's. 1 is the default, and contradicts nothing."""
    world = machine.world
    if world is None or request.num_nodes in (1, world.num_nodes):
        return None
    return (
        f"`num_nodes={request.num_nodes}` was written, but {describe_world(machine)}, on {world.num_nodes} "
        f"node{'s' * (world.num_nodes > 1)}. Leave `num_nodes` out, or start it on {request.num_nodes} nodes."
    )


def output_against_a_foreign_world(request: Request, machine: Machine) -> str | None:
    """Options for the output of ranks that another launcher has started."""
    if machine.world is None or machine.world.launcher in OURS or not (request.log_dir or request.prefix_output):
        return None
    written = f"log_dir={request.log_dir!r}" if request.log_dir else "prefix_output=True"
    return (
        f"`{written}` is for ranks that fabric starts, but {describe_world(machine)}, which owns their output. Leave "
        "it out, and use that launcher's own options, such as `srun --output=rank-%t.log` or `torchrun --log-dir`."
    )


def grace_against_a_foreign_world(request: Request, machine: Machine) -> str | None:
    """A time after SIGTERM for ranks that another launcher has started."""
    if machine.world is None or machine.world.launcher in OURS or request.stop_grace_seconds is None:
        return None
    return (
        f"`stop_grace_seconds={request.stop_grace_seconds:g}` is for ranks that fabric starts, but "
        f"{describe_world(machine)}, which ends them. Leave it out, and use that launcher's own time: of SLURM, "
        "`KillWait` in slurm.conf, or an earlier signal by `#SBATCH --signal=USR1@600`."
    )


def place_of_a_node(request: Request, machine: Machine) -> str | None:
    """The rank of this node and the address of node 0, which are missing, or not needed."""
    place = {"--node-rank": request.node_rank, "--main-address": request.main_address, "--main-port": request.main_port}
    written = " ".join(f"{option} {value}" for option, value in place.items() if value is not None)
    world, nodes = machine.world, request.num_nodes
    if world is not None and world.launcher in OURS:
        return None
    if world is not None or nodes == 1:
        why = describe_world(machine) if world is not None else "`num_nodes=1`"
        said = f"`{written}` is for several nodes that fabric starts, but {why}. Add `--num-nodes`, or leave it out."
        return said if written else None
    missing = [option for option, value in place.items() if value is None]
    if not missing and (request.node_rank or 0) >= nodes:
        return f"`--node-rank {request.node_rank}` with `num_nodes={nodes}`: nodes count from 0 to {nodes - 1}."
    if not missing:
        return None
    return (
        f"`num_nodes={nodes}` needs the rank of this node and the address and port of node 0; missing: "
        f"{', '.join(missing)}. On each node, run `fabric run --num-nodes {nodes} --node-rank N --main-address HOST "
        f"--main-port 29500 SCRIPT`, N from 0 to {nodes - 1} and HOST being node 0; or start it with torchrun or srun."
    )


def launcher_against_the_program(request: Request, machine: Machine) -> str | None:
    """A launcher that this program, or this system, cannot use."""
    if machine.world is not None or request.launcher not in OURS:
        return None
    return launcher_row(request.launcher).why_not(machine.program)


def restarts_that_no_launcher_makes(request: Request, machine: Machine) -> str | None:
    """Restarts of ranks that 'elastic' does not start, or of several nodes, between which supervisors do not agree."""
    world, other = machine.world, None
    if request.max_restarts is None and request.launcher != "elastic":
        return None
    if world is not None:
        other = describe_world(machine) if world.launcher not in OURS else None
    elif request.num_nodes > 1:
        other = f"`num_nodes={request.num_nodes}`"
    elif request.launcher not in ("auto", "elastic"):
        other = f"`launcher={request.launcher!r}`"
    if other is None:
        return None
    return (
        f"`--max-restarts` and `launcher='elastic'` are for ranks that fabric starts on one node, but {other}. Leave "
        "one of them out, or start each node with `torchrun --nnodes N --max-restarts M --rdzv-backend c10d ...`."
    )


CONFLICTS: tuple[Conflict, ...] = (
    launcher_against_the_world,
    nodes_against_the_world,
    output_against_a_foreign_world,
    grace_against_a_foreign_world,
    restarts_that_no_launcher_makes,
    place_of_a_node,
    launcher_against_the_program,
)


def strategy_against_the_launcher(strategy: Strategy, word: str, request: Request, machine: Machine) -> str | None:
    """The strategy needs another launcher than the requested one, or than the one that started this process."""
    own = [launcher for launcher in strategy.launchers if launcher != "inline"]
    if not own or set(own) == set(PER_DEVICE):
        return None
    if machine.world is not None:
        other = describe_world(machine) if machine.world.launcher not in own else None
    elif request.max_restarts is not None:
        other = "`--max-restarts` by 'elastic'"
    else:
        is_other = request.launcher in OURS and request.launcher not in own
        other = f"`launcher={request.launcher!r}` was written" if is_other else None
    if other is None:
        return None
    # No strategy over XLA leaves the launcher open.
    another = "" if strategy.marks_steps else ", or a strategy that leaves the launcher open, such as 'ddp'"
    return (
        f"`strategy={word}` starts its processes by {' or '.join(map(repr, own))}, but {other}. Choose one of the two"
        f"{another}."
    )


def sanitize_against_the_strategy(strategy: Strategy, word: str, request: Request) -> str | None:
    """Steps that a device records are not compared: reading a number would end the graph."""
    if request.sanitize in ("start", False) or not strategy.marks_steps:
        return None
    return (
        f"`sanitize={request.sanitize!r}` reads weights and gradients in a step, and `strategy={word}` records steps "
        "and runs each as one graph. Leave `sanitize` out, or write a strategy on CPU or CUDA, such as 'ddp'."
    )


def accelerator_against_the_precision(accelerator: Accelerator, precision: Precision) -> str | None:
    """A dtype that the device does not support. Source: Metal has no double; torch raises "doesn't support float64"."""
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
    if world.launcher == "local":
        names = " ".join(each.partition("=")[0] for each in machine.variables)
        read += f"; if no launch by hand is meant, `unset {names}`"
    processes = f"{world.size} process{'es' * (world.size > 1)}"
    return f"{world.launcher} started {processes} ({world.local_size} on this node{read})"
