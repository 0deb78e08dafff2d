"""Strategies by name: the built-in table below, those a program registered, and those of installed packages.

Reading the table imports no strategy; creating one imports only its module. See Note [What is registered] in
`accelerators/registry.py` for why `_REGISTERED` is module state, and when entry points are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.strategies.strategy import Strategy

ENTRY_POINTS = "fabric.strategies"
"""The entry-point group in which a package names a callable without arguments that returns a `Strategy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A name, the factory of its strategy, and a line that says when to use it."""

    name: str
    make: Callable[[], Any]
    """Creates the strategy. The result is checked, because it may be a third-party function."""
    description: str
    source: str = "torchfabric"
    """Who registered it: torchfabric, a distribution, or this program."""

    def strategy(self) -> Strategy:
        """The strategy of this name. Raises TypeError if the factory returned something else."""
        from fabric.strategies.strategy import Strategy

        made = self.make()
        if not isinstance(made, Strategy):
            raise TypeError(
                f"The strategy {self.name!r} of {self.source} made {made!r}, a `{type(made).__name__}` and not a "
                f"`fabric.strategies.Strategy`. Register a callable that returns one."
            )
        return made


def _built_in(name: str, path: str, description: str, **options: Any) -> Registration:
    module, attribute = path.split(":")
    return Registration(
        name=name,
        make=lambda: getattr(import_module(f"fabric.strategies.{module}"), attribute)(**options),
        description=description,
    )


_DDP, _FSDP = "ddp.strategy:DDPStrategy", "fsdp.strategy:FSDPStrategy"
_SHARDED_DDP = "fairscale.sharded_ddp:FairScaleShardedStrategy"
_DEEPSPEED = "deepspeed.strategy:DeepSpeedStrategy"
_TABLE = (
    _built_in("single_device", "single_device:SingleDeviceStrategy", "one process, one device"),
    _built_in("dp", "dp:DataParallelStrategy", "one process, several devices; ddp is faster"),
    _built_in("ddp", _DDP, "a process per device, gradients averaged"),
    _built_in("ddp_spawn", _DDP, "ddp, processes started by spawn", launcher="spawn"),
    _built_in("ddp_fork", _DDP, "ddp, processes started by fork", launcher="fork"),
    _built_in("ddp_notebook", _DDP, "ddp from a notebook: by fork", launcher="fork"),
    _built_in(
        "ddp_find_unused_parameters_true",
        _DDP,
        "ddp for models that leave out some parameters in some steps",
        find_unused_parameters=True,
    ),
    _built_in("fsdp", _FSDP, "parameters, gradients and optimizer state in shards (FSDP2)"),
    _built_in("fsdp_cpu_offload", _FSDP, "fsdp, shards in the CPU's memory", cpu_offload=True),
    _built_in("hsdp", _FSDP, "fsdp within each node, replicas over nodes", device_mesh="nodes"),
    _built_in(
        "model_parallel",
        "model_parallel.strategy:ModelParallelStrategy",
        "a mesh, and your parallelize_fn(model, mesh)",
    ),
    _built_in("manual", "manual.strategy:ManualStrategy", "parallelism by your parallelize(module, context)"),
    _built_in("ddp_sharded", _SHARDED_DDP, "FairScale: gradients, optimizer state split"),
    _built_in("ddp_sharded_spawn", _SHARDED_DDP, "ddp_sharded, processes started by spawn", launcher="spawn"),
    _built_in("ddp_fully_sharded", "fairscale.fsdp:FairScaleFSDPStrategy", "FairScale: everything in slices; see fsdp"),
    _built_in("horovod", "horovod.strategy:HorovodStrategy", "a process per device, gradients averaged by Horovod"),
    _built_in("deepspeed", _DEEPSPEED, "DeepSpeed's ZeRO, stage 2"),
    _built_in("deepspeed_stage_1", _DEEPSPEED, "ZeRO: optimizer states in shards", stage=1),
    _built_in("deepspeed_stage_2", _DEEPSPEED, "ZeRO: gradients in shards, too", stage=2),
    _built_in("deepspeed_stage_3", _DEEPSPEED, "ZeRO: weights in shards, too", stage=3),
    _built_in("xla", "xla.replicas:XLAStrategy", "a replica for each TPU device, gradients averaged (torch_xla)"),
    _built_in("xla_fsdp", "xla.fsdp:XLAFSDPStrategy", "one program over all TPU devices of a host, in shards"),
    _built_in("single_xla", "xla.single_device:SingleDeviceXLAStrategy", "one process, one TPU device"),
    _built_in(
        "deepspeed_stage_1_offload",
        _DEEPSPEED,
        "deepspeed_stage_1, optimizer states in main memory",
        stage=1,
        offload_optimizer=True,
    ),
    _built_in(
        "deepspeed_stage_2_offload",
        _DEEPSPEED,
        "deepspeed_stage_2, optimizer states in main memory",
        stage=2,
        offload_optimizer=True,
    ),
    _built_in(
        "deepspeed_stage_3_offload",
        _DEEPSPEED,
        "deepspeed_stage_3, optimizer states and weights in main memory",
        stage=3,
        offload_optimizer=True,
        offload_parameters=True,
    ),
)
_VARIANTS: Mapping[tuple[str, str], str] = {
    # torch_xla 2.9 loses gradients reduced in place: see Note [Averages are new tensors] in `xla/replicas.py`.
    ("fabric.strategies.ddp.strategy:DDPStrategy", "xla"): "fabric.strategies.xla.replicas:XLAStrategy",
    ("fabric.strategies.model_parallel.strategy:ModelParallelStrategy", "xla"): (
        "fabric.strategies.xla.model_parallel:XLAModelParallelStrategy"
    ),
}
"""The class that replaces a strategy on an accelerator which needs another implementation."""
_BUILT_IN: Mapping[str, Registration] = {registration.name: registration for registration in _TABLE}
_REGISTERED: dict[str, Registration] = {}


def variant_for(strategy: Strategy, accelerator: str, *, word: str) -> Strategy:
    """The variant of a strategy for an accelerator: the strategy itself, unless the table has another class.

    `word`: the strategy as written, for the error. Raises: ValueError: an option is set that the variant does not have.
    """
    from fabric.strategies.options import carry_over

    made = type(strategy)
    path = _VARIANTS.get((f"{made.__module__}:{made.__qualname__}", accelerator))
    if path is None:
        return strategy
    module, attribute = path.split(":")
    return carry_over(strategy, getattr(import_module(module), attribute), word=word, accelerator=accelerator)  # type: ignore[no-any-return]


def available_strategies() -> tuple[str, ...]:
    """Every name that `Fabric(strategy=...)` knows, whether or not this machine can run it."""
    return tuple(strategy_registrations())


def strategy_registrations() -> Mapping[str, Registration]:
    """Every name with its registration. Reads the entry points of all installed packages.

    Raises: ValueError: an installed package gives a name that is taken.
    """
    return {**_BUILT_IN, **_REGISTERED, **_installed()}


def make_strategy(name: str) -> Strategy:
    """The strategy of a name.

    Raises: ValueError: the name is unknown; the message has similar names and all names.
    Raises: TypeError: the factory of the name returned something that is no `Strategy`.
    """
    registration = _BUILT_IN.get(name) or _REGISTERED.get(name) or _installed().get(name)
    if registration is None:
        known = available_strategies()
        near = "".join(f"Did you mean {match!r}? " for match in get_close_matches(name, known, n=1))
        raise ValueError(
            f"`strategy={name!r}` is not known. {near}Write 'auto' or one of {', '.join(map(repr, known))}; "
            f"`register_strategy` adds one."
        )
    return registration.strategy()


def register_strategy(name: str, factory: Callable[[], Strategy], *, description: str = "") -> None:
    """Make `Fabric(strategy=name)` use the result of `factory()`, in this process from now on.

    A strategy's class is a factory; `functools.partial(DDPStrategy, static_graph=True)` is one with options.
    `description` is the line that `fabric doctor` shows.
    Raises: ValueError: the name is taken.
    """
    taken = {"auto", *_BUILT_IN, *_REGISTERED}
    if name in taken:
        raise ValueError(
            f"`register_strategy({name!r}, ...)`: the name is taken, as are {', '.join(map(repr, sorted(taken)))}. "
            f"Choose another."
        )
    _REGISTERED[name] = Registration(name=name, make=factory, description=description, source="this program")


def _installed() -> dict[str, Registration]:
    """The strategies of installed packages; importing nothing of them."""
    found: dict[str, Registration] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        source = entry.dist.name if entry.dist is not None else entry.value
        owner = {**_BUILT_IN, **_REGISTERED, **found}.get(entry.name)
        if owner is not None:
            raise ValueError(
                f"The installed package {source!r} names a strategy {entry.name!r} (entry point {entry.value!r}), but "
                f"that is a strategy of {owner.source} already. Uninstall one, or rename it."
            )
        found[entry.name] = Registration(
            name=entry.name,
            make=partial(_load_and_call, entry),
            description=f"from {source}",
            source=source,
        )
    return found


def _load_and_call(entry: EntryPoint) -> Any:
    return entry.load()()
