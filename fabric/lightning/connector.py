"""Convert the arguments of Lightning Fabric's `Fabric`, and names of reductions, to those of the core."""

from typing import Any, Literal, TypeAlias

from fabric.lightning.accelerators import Accelerator
from fabric.lightning.plugins import CheckpointIO, ClusterEnvironment, Precision, refuse_checkpoint_io
from fabric.lightning.strategies.strategy import Strategy
from fabric.strategies.accelerators.accelerator_registry import available_accelerators
from fabric.strategies.collectives.collective import ReduceOp

_PRECISION_INPUT_INT: TypeAlias = Literal[64, 32, 16]
_PRECISION_INPUT_STR_ALIAS: TypeAlias = Literal["64", "32", "16", "bf16"]
_PRECISION_INPUT_STR: TypeAlias = Literal["16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true"]
_PRECISION_INPUT: TypeAlias = _PRECISION_INPUT_INT | _PRECISION_INPUT_STR | _PRECISION_INPUT_STR_ALIAS
_PLUGIN_INPUT: TypeAlias = Precision | ClusterEnvironment | CheckpointIO


def core_arguments(
    accelerator: Any, strategy: Any, devices: Any, num_nodes: Any, precision: Any, plugins: Any, callbacks: Any
) -> dict[str, Any]:
    """Keyword arguments of the core's `Fabric`, which checks them."""
    plugins = plugins if isinstance(plugins, list | tuple) else () if plugins is None else (plugins,)
    for plugin in plugins:
        if isinstance(plugin, CheckpointIO):
            refuse_checkpoint_io(plugin)
    precisions = [plugin.core for plugin in plugins if isinstance(plugin, Precision)]
    if isinstance(precision, Precision):
        precision = precision.core
    if precision is None:
        precision = "32-true"
    return {
        "accelerator": _accelerator(accelerator),
        "strategy": strategy.core(num_nodes) if isinstance(strategy, Strategy) else _strategy(strategy),
        "devices": devices,
        "num_nodes": num_nodes,
        "precision": precision,
        "plugins": [*precisions, *(each for each in plugins if not isinstance(each, Precision | CheckpointIO))],
        "callbacks": callbacks,
    }


def _strategy(word: Any) -> Any:
    """The core's name of a strategy: without the suffix for an option that is the default."""
    return word.removesuffix("_find_unused_parameters_false") if isinstance(word, str) else word


def _accelerator(word: Any) -> Any:
    if isinstance(word, Accelerator):
        return word.name()
    if word == "tpu":
        return "xla"
    if word == "gpu":
        return next((name for name in ("cuda", "mps", "xpu") if name in available_accelerators()), "cuda")
    return word


_REDUCTIONS: dict[str, ReduceOp] = {
    "avg": "mean",
    "max": "max",
    "mean": "mean",
    "min": "min",
    "product": "product",
    "sum": "sum",
}
"""By name; torch's `ReduceOp.AVG` has the name "AVG"."""


def reduction(operation: Any) -> ReduceOp:
    """The core's name of a reduction: a name, an operation of torch, or None for the sum.

    Raises: ValueError: there is no such reduction.
    """
    if operation is None:
        return "sum"
    name = str(operation if isinstance(operation, str) else getattr(operation, "name", "")).lower()
    if name in _REDUCTIONS:
        return _REDUCTIONS[name]
    known = ", ".join(map(repr, _REDUCTIONS))
    raise ValueError(f"`reduce_op={operation!r}` is not a reduction. Write one of {known}.")
