"""From the request and the machine to one complete configuration, or to an error that says what to write instead.

A pure function of two values (and of the tables of names), so that every rule is a row of a test. It chooses values for
`auto`; other values are honoured or refused, never replaced:

- The world in the environment decides: `auto` takes its sizes, and a number that differs from them is an error.
  One device inside a rank may be a world of its own: see `_world_of_its_own`.
- Without a world, `devices='auto'` is one process on the CPU, and elsewhere every device that the strategy can use.
- `accelerator='auto'` is the one torch reports, else the CPU. `strategy='auto'` is `single_device` for one process
  and `ddp` for more.
- One process needs no launcher, whatever `launcher` is: the calling process is the rank.

Pairs of arguments that contradict each other, or an argument that contradicts the machine, have a function and an error
each: `CONFLICTS`, in the order in which they are checked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from fabric.configure.devices import choose_devices, requested_devices
from fabric.configure.machine import Found, Machine, describe_world
from fabric.configure.parse import DEFAULT_MAX_RESTARTS
from fabric.configure.request import Request
from fabric.launchers.environments import ENVIRONMENTS
from fabric.launchers.launcher import Topology
from fabric.launchers.launcher_registry import OURS, PER_DEVICE, launcher_row
from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.options import check_options, with_timeout
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy
from fabric.strategies.strategy_registry import make_strategy

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


def options_against_a_foreign_world(request: Request, machine: Machine) -> str | None:
    """Options for the output and the end of ranks that another launcher has started."""
    if machine.world is None or machine.world.launcher in OURS:
        return None
    if request.log_dir or request.prefix_output:
        written = f"log_dir={request.log_dir!r}" if request.log_dir else "prefix_output=True"
        rest = (
            "owns their output. Leave it out, and use that launcher's own options, such as `srun "
            "--output=rank-%t.log` or `torchrun --log-dir`."
        )
    elif request.stop_grace_seconds is not None:
        written = f"stop_grace_seconds={request.stop_grace_seconds:g}"
        rest = (
            "ends them. Leave it out, and use that launcher's own time: of SLURM, `KillWait` in slurm.conf, or an "
            "earlier signal by `#SBATCH --signal=USR1@600`."
        )
    else:
        return None
    return f"`{written}` is for ranks that fabric starts, but {describe_world(machine)}, which {rest}"


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
    options_against_a_foreign_world,
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
    if strategy.activation_offload is not None and (accelerator.name in ("cpu", "mps") or accelerator.is_recorded):
        return (
            f"`activation_offload` with `accelerator={accelerator.name!r}`: activations move to pinned host memory "
            "from a device that torch drives with streams, such as CUDA. Leave it out here; "
            "`activation_checkpointing_policy` saves memory on every device."
        )
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


class Setting(NamedTuple):
    """One setting of a run, its value in words, and where that came from (`explain`)."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Everything that `launch` and `connect` need. Picklable."""

    strategy: Strategy
    accelerator: Accelerator
    devices: tuple[int, ...]
    """Indices of the devices this node uses; `devices[local_rank]` is the device of a rank, if each rank has one."""
    precision: Precision
    launcher: str
    """For `choose_launcher`: a name in `launchers/launcher_registry.py`, auto (the safest at `launch`), or external."""
    max_restarts: int
    """The maximal number of restarts of `elastic`."""
    world: World | None
    """The existing world; None if our launcher makes it."""
    topology: Topology
    """The number of processes and nodes."""
    machine: Machine
    """The machine for which this was chosen."""
    settings: tuple[Setting, ...] = ()
    """Every setting, with its source. Added by `configure`."""


def resolve(request: Request, machine: Machine) -> Resolved:
    """Choose and check everything that can be known before a process is started.

    Raises: ValueError: arguments contradict each other, or this machine. TypeError: an option of a strategy has the
    wrong type.
    """
    machine = _world_of_its_own(request, machine)
    for conflict in CONFLICTS:
        _refuse(conflict(request, machine))
    found = _found(request, machine)
    strategy, word = _strategy(request, machine, found)
    check_options(strategy)
    strategy = _with_timeout(strategy, word, request)
    _refuse(strategy_against_the_launcher(strategy, word, request, machine))
    _refuse(sanitize_against_the_strategy(strategy, word, request))
    _refuse(accelerator_against_the_precision(found.accelerator, request.precision))
    _refuse(accelerator_against_the_strategy(found.accelerator, strategy, word))
    devices = choose_devices(request, machine, found, strategy)
    _check_world(request, machine, strategy, word, len(devices))
    num_nodes = machine.world.num_nodes if machine.world is not None else request.num_nodes
    _refuse(strategy.refuse(machine.target(found, len(devices), num_nodes, request.precision)))
    topology = _topology(request, machine, strategy.num_processes(len(devices)))
    return Resolved(
        strategy=strategy,
        accelerator=found.accelerator,
        devices=devices,
        precision=request.precision,
        launcher=_launcher(request, machine, strategy, topology),
        max_restarts=DEFAULT_MAX_RESTARTS if request.max_restarts is None else request.max_restarts,
        world=machine.world,
        topology=topology,
        machine=machine,
    )


def _world_of_its_own(request: Request, machine: Machine) -> Machine:
    """The machine for a fabric of one process inside a rank (a player beside the learner, a merge on rank 0), whose
    device is the one that the rank already uses; the machine unchanged if the request asks for none.

    Under an external launcher, one device may be a mistake: `torchrun --nproc-per-node 2` with a script for one device
    would make two worlds, each with a "rank 0" that writes the same files. So there, the process must have joined the
    other ranks before. A rank of our own launchers needs no such proof: the program asked for several ranks. If each
    node has one process, `devices=1` describes the existing world; `strategy='single_device'` makes a separate one.
    """
    world = machine.world
    if world is None or world.size == 1 or not request.asks_for_one(world):
        return machine
    if world.launcher not in OURS and not machine.has_met_others:
        return machine
    own_device = machine.current_device if machine.current_device is not None else world.local_rank
    return replace(machine, world=None, variables=(), own_device=own_device)


def _with_timeout(strategy: Strategy, word: str, request: Request) -> Strategy:
    seconds = request.timeout_seconds
    if seconds is None or strategy.launchers == ("inline",):  # one process waits for no other
        return strategy
    timed = with_timeout(strategy, seconds)
    if timed is None:
        raise ValueError(
            f"`timeout_seconds={seconds:g}`, but `strategy={word}` has no `timeout_seconds`, or another one already. "
            f"Leave one of them out."
        )
    return timed


def _refuse(sentence: str | None) -> None:
    if sentence is not None:
        raise ValueError(sentence)


def _found(request: Request, machine: Machine) -> Found:
    if request.accelerator == "auto":
        return machine.usable()[0]
    name = request.accelerator if isinstance(request.accelerator, str) else request.accelerator.name
    found = machine.of(name)
    if found.why_unavailable is not None:
        here = ", ".join(usable.accelerator.name for usable in machine.usable())
        raise ValueError(
            f"`accelerator={name!r}` cannot be used here. {found.why_unavailable} Here: {here}. Write one of these, or "
            f"'auto'."
        )
    return found


def _strategy(request: Request, machine: Machine, found: Found) -> tuple[Strategy, str]:
    """The strategy, and its name for an error."""
    if isinstance(request.strategy, Strategy):
        return request.strategy, f"{type(request.strategy).__name__}(...)"
    word = request.strategy if request.strategy != "auto" else _auto_strategy(request, machine, found)
    return make_strategy(word), repr(word)


def _auto_strategy(request: Request, machine: Machine, found: Found) -> str:
    if request.devices != "auto":
        num_devices = len(requested_devices(request, machine, found))
    else:
        num_devices = found.num_devices if machine.world is None else machine.world.local_size
    num_nodes = request.num_nodes if machine.world is None else machine.world.num_nodes
    several = num_devices > 1 or num_nodes > 1
    return found.accelerator.auto_strategies[several]


def _check_world(request: Request, machine: Machine, strategy: Strategy, word: str, num_devices: int) -> None:
    world, processes = machine.world, strategy.num_processes(num_devices)
    if world is None or processes == world.local_size:
        return
    sentence = (
        f"`devices` and `strategy={word}` ask for {processes} process{'es' * (processes > 1)} on this node, but "
        f"{describe_world(machine)}. Leave `devices` out, write a strategy for several processes, such as 'ddp', or "
        f"start {processes}."
    )
    if processes == 1:
        sentence += (
            " For a separate world of one process, create `Fabric(devices=1, strategy='single_device')` after the "
            "`launch()` of the fabric that has all ranks."
        )
    raise ValueError(sentence)


def _topology(request: Request, machine: Machine, num_processes: int) -> Topology:
    world = machine.world
    if world is None:
        return Topology(
            num_processes=num_processes,
            num_nodes=request.num_nodes,
            node_rank=request.node_rank or 0,
            main_address=request.main_address or "127.0.0.1",
            main_port=request.main_port or 0,
            log_dir=request.log_dir,
            prefix_output=request.prefix_output,
            stop_grace_seconds=request.stop_grace_seconds,
        )
    sizes = Topology(num_processes=world.local_size, num_nodes=world.num_nodes, node_rank=world.node_rank)
    at = world.rendezvous
    return sizes if at is None else replace(sizes, main_address=at.address, main_port=at.port)


def _launcher(request: Request, machine: Machine, strategy: Strategy, topology: Topology) -> str:
    if machine.world is not None:
        return "external"
    if request.launcher == "elastic" or request.max_restarts is not None:
        return "elastic"
    if topology.size == 1:
        return request.launcher if topology.redirects_output else "inline"
    if request.launcher != "auto" or set(PER_DEVICE) <= set(strategy.launchers):
        return request.launcher
    own = strategy.launchers[0]
    _refuse(launcher_row(own).why_not(machine.program))
    return own
