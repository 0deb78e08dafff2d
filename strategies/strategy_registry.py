"""Strategies by name: the built-in table below, those a program registered, and those of installed packages.

Reading the table imports no strategy; creating one imports only its module.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fabric.strategies.registered_names import Registration, Registry

if TYPE_CHECKING:
    from fabric.strategies.strategy import Strategy

_DDP = "ddp.strategy:DDPStrategy"
_FSDP = "fsdp.strategy:FSDPStrategy"
_DEEPSPEED = "deepspeed.strategy:DeepSpeedStrategy"
_SHARDED_DDP = "fairscale.sharded_ddp:FairScaleShardedStrategy"
_OFFLOAD = {"offload_optimizer": True}
TABLE: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "single_device": ("single_device:SingleDeviceStrategy", "one process, one device", {}),
    "dp": ("dp:DataParallelStrategy", "one process, several devices; ddp is faster", {}),
    "ddp": (_DDP, "a process per device, gradients averaged", {}),
    "ddp_spawn": (_DDP, "ddp, processes started by spawn", {"launcher": "spawn"}),
    "ddp_fork": (_DDP, "ddp, processes started by fork", {"launcher": "fork"}),
    "ddp_notebook": (_DDP, "ddp from a notebook: by fork", {"launcher": "fork"}),
    "ddp_find_unused_parameters_true": (_DDP, "ddp, steps may leave out parameters", {"find_unused_parameters": True}),
    "fsdp": (_FSDP, "parameters, gradients and optimizer state in shards (FSDP2)", {}),
    "fsdp_cpu_offload": (_FSDP, "fsdp, shards in the CPU's memory", {"cpu_offload": True}),
    "hsdp": (_FSDP, "fsdp within each node, replicas over nodes", {"device_mesh": "nodes"}),
    "model_parallel": (
        "model_parallel.strategy:ModelParallelStrategy",
        "a mesh of ranks, over which your function distributes the model",
        {},
    ),
    "manual": ("manual.strategy:ManualStrategy", "your function parallelises the model", {}),
    "ddp_sharded": (_SHARDED_DDP, "FairScale: gradients, optimizer state split", {}),
    "ddp_sharded_spawn": (_SHARDED_DDP, "ddp_sharded, processes started by spawn", {"launcher": "spawn"}),
    "ddp_fully_sharded": ("fairscale.fsdp:FairScaleFSDPStrategy", "FairScale: everything in slices; see fsdp", {}),
    "horovod": ("horovod.strategy:HorovodStrategy", "a process per device, gradients averaged by Horovod", {}),
    "deepspeed": (_DEEPSPEED, "DeepSpeed's ZeRO, stage 2", {}),
    "deepspeed_stage_1": (_DEEPSPEED, "ZeRO: optimizer states in shards", {"stage": 1}),
    "deepspeed_stage_2": (_DEEPSPEED, "ZeRO: gradients in shards, too", {"stage": 2}),
    "deepspeed_stage_3": (_DEEPSPEED, "ZeRO: weights in shards, too", {"stage": 3}),
    "xla": ("xla.replicas:XLAStrategy", "a replica for each TPU device, gradients averaged (torch_xla)", {}),
    "xla_fsdp": ("xla.fsdp:XLAFSDPStrategy", "one program over all TPU devices of a host, in shards", {}),
    "single_xla": ("xla.single_device:SingleDeviceXLAStrategy", "one process, one TPU device", {}),
    "deepspeed_stage_1_offload": (_DEEPSPEED, "stage 1, states in main memory", {"stage": 1, **_OFFLOAD}),
    "deepspeed_stage_2_offload": (_DEEPSPEED, "stage 2, states in main memory", {"stage": 2, **_OFFLOAD}),
    "deepspeed_stage_3_offload": (
        _DEEPSPEED,
        "stage 3, states and weights in main memory",
        {"stage": 3, **_OFFLOAD, "offload_parameters": True},
    ),
}
"""By name: `module:class` within `fabric.strategies`, when to use it, and its options."""


def _make(path: str, options: Mapping[str, Any]) -> Any:
    return resolve_name(f"fabric.strategies.{path}")(**options)


_STRATEGIES: "Registry[Strategy]" = Registry(
    "strategy",
    "fabric.strategies",
    (
        Registration(name=name, make=partial(_make, path, options), description=description)
        for name, (path, description, options) in TABLE.items()
    ),
)


def available_strategies() -> tuple[str, ...]:
    """Every name that `Fabric(strategy=...)` knows, whether or not this machine can run it."""
    return tuple(_STRATEGIES.all())


def strategy_registrations() -> Mapping[str, Registration]:
    """Every name with its registration. Reads the entry points of all installed packages."""
    return _STRATEGIES.all()


def make_strategy(name: str) -> "Strategy":
    """The strategy of a name.

    Raises: ValueError: the name is unknown; the message has similar names and all names.
    """
    return _STRATEGIES.make(name)


def register_strategy(name: str, factory: "Callable[[], Strategy]", *, description: str = "") -> None:
    """Make `Fabric(strategy=name)` use the result of `factory()`, in this process from now on.

    A strategy's class is a factory; `functools.partial(DDPStrategy, static_graph=True)` is one with options.
    `description` is the line that `fabric doctor` shows.
    Raises: ValueError: the name is taken.
    """
    _STRATEGIES.register(name, factory, description)
