"""Lightning Fabric's `Fabric`, implemented by the core's: `fabric.core`.

Each method has that library's arguments and calls the core. Differences in results are in
`docs/coming-from/lightning.md`.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.fabric import Fabric as CoreFabric
from fabric.launchers.launcher_registry import LAUNCHERS
from fabric.launchers.process.program import caller_that_continues
from fabric.lightning.accelerators import Accelerator, accelerator_of
from fabric.lightning.connector import core_arguments, reduction
from fabric.lightning.strategies import Strategy, strategy_of
from fabric.lightning.unsupported import unsupported
from fabric.lightning.utilities.seed import seed_everything
from fabric.lightning.wrappers import _FabricDataLoader, _FabricModule, prepared, unwrap
from fabric.output.callbacks import methods
from fabric.strategies.checkpoint import other_formats
from fabric.strategies.checkpoint.tensors import gathered
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.step_hooks import hook_steps
from fabric.strategies.tensors.nests import map_by_path

T = TypeVar("T")


class Fabric:
    """Runs a PyTorch loop that was written for Lightning Fabric. Other methods of the core can be called, too.

    Arguments are that library's; `core_options` are others of `fabric.Fabric` (`launcher`, `deterministic`, ...).
    `precision=None` is "32-true". `accelerator="gpu"` is the type of GPU that is available, and "tpu" is "xla".
    """

    def __init__(
        self,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
        **core_options: Any,
    ) -> None:
        arguments = core_arguments(accelerator, strategy, devices, num_nodes, precision, plugins, callbacks)
        self.core = CoreFabric(**arguments, loggers=loggers, **core_options)
        self.core.draws_apart = False  # as in Lightning Fabric
        known = strategy if isinstance(strategy, Strategy) else strategy_of(self.core.strategy)
        self._strategy = known.within(self.core)
        self._callbacks: list[Any] = [*_several(callbacks)]
        self._models: list[nn.Module] = []
        self._stepped: list[tuple[Optimizer, nn.Module]] = []
        self._hooks: list[Callable[[], None]] = []
        self._launched = False

    def __getattr__(self, name: str) -> Any:
        """Attributes that only the core has: `progress`, `should_stop`, `average_gradients`, ..."""
        if name.startswith("_") or "core" not in self.__dict__:
            raise AttributeError(f"`{type(self).__name__}` has no attribute {name!r}.")
        value = getattr(self.core, name)
        if not callable(value):
            return value

        @wraps(value)
        def of_core(*args: Any, **kwargs: Any) -> Any:
            return value(*map(_inner, args), **{key: _inner(each) for key, each in kwargs.items()})

        return of_core

    def __enter__(self) -> "Fabric":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Ranks and devices

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator."""
        return accelerator_of(self.core.accelerator.name)

    @property
    def strategy(self) -> Strategy:
        """The strategy; `strategy.core(1)` is the core's."""
        return self._strategy

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.core.device

    @property
    def global_rank(self) -> int:
        """This process's rank over all nodes."""
        return self.core.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.core.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.core.node_rank

    @property
    def world_size(self) -> int:
        """The number of ranks over all nodes. Available before `launch`."""
        return self.core._configuration.topology.size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.core.is_global_zero

    @property
    def loggers(self) -> list[Any]:
        """The loggers. The list may be changed and assigned."""
        return self.core.loggers

    @loggers.setter
    def loggers(self, loggers: Any) -> None:
        self.core.loggers[:] = _several(loggers)

    @property
    def logger(self) -> Any:
        """The first logger. Raises IndexError if there is none, as that library does."""
        if not self.core.loggers:
            raise IndexError("`fabric.logger`: there is no logger. Pass one to `Fabric(loggers=...)`.")
        return self.core.loggers[0]

    # Launching and closing

    def launch(self, function: Callable[..., T] | None = None, *args: Any, **kwargs: Any) -> T | None:
        """Start the ranks; a second call without a function does nothing.

        With a function: each rank calls `function(fabric, ...)` and continues after it, with its own result, as with
        that library. With `spawn`, `forkserver` and in a notebook the ranks end after it, and rank 0's result is
        returned.
        """
        if function is None:
            if not self._launched:
                self._launched = True
                self.core.launch()
            return None
        if not callable(function):
            raise TypeError(
                f"`fabric.launch({function!r})` was given a `{type(function).__name__}`. Pass a function "
                "`(fabric, ...)`, without calling it."
            )
        if not inspect.signature(function).parameters:
            raise TypeError(
                f"`fabric.launch({function.__qualname__})`: the function takes no argument, but is passed the fabric. "
                f"Write `def {function.__qualname__}(fabric)`."
            )
        if self._launched:
            return function(self, *args, **kwargs)
        self._launched = True
        if self._ranks_end_with_function():
            return self.core.launch(_run, self, function, args, kwargs)
        self.core.launch()
        return function(self, *args, **kwargs)

    def close(self) -> None:
        """Destroy the process group, and restore the environment and the user's objects."""
        for remove in self._hooks:
            remove()
        self.core.close()
        self._models, self._stepped, self._hooks = [], [], []
        self._launched = False

    # Preparing

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Prepare a model and its optimizers: the module alone, or with the optimizers (and the scheduler) in order."""
        given = prepared(module)
        assert given is not None
        result = self.core.setup(given, *optimizers, move_to_device=move_to_device)
        model, *rest = result if isinstance(result, tuple) else (result,)
        wrapper = _FabricModule(model, self.core.precision)
        self._models.append(model)
        self._stepped += [(optimizer, model) for optimizer in rest]
        self._watch(rest)
        if "_fabric" in vars(wrapper.module):  # a LightningModule, whose `log` and `print` go to its fabric
            wrapper.module._fabric = self  # type: ignore[assignment]
            wrapper.module._fabric_optimizers = list(rest)  # type: ignore[assignment]
            if not any(callback is wrapper.module for callback in self._callbacks):
                self._callbacks.append(wrapper.module)
        self.call("on_after_setup", fabric=self, module=wrapper)
        if not rest:
            return wrapper
        return (wrapper, *rest) if scheduler is None else (wrapper, *rest, scheduler)

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> _FabricModule:
        """Prepare a model without optimizers."""
        wrapper: _FabricModule = self.setup(module, move_to_device=move_to_device)
        return wrapper

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers of models that are set up: the optimizer alone, or all in the order given."""
        result = self.core.setup_optimizers(*optimizers)
        self._watch(optimizers)
        return result

    def setup_dataloaders(
        self, *dataloaders: Iterable[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Distribute loaders over ranks and move their batches: returns the loader, or a list of all in order."""
        result = self.core.setup_dataloaders(
            *dataloaders, use_distributed_sampler=use_distributed_sampler, move_to_device=move_to_device
        )
        loaders = list(result) if len(dataloaders) > 1 else [result]
        for loader in loaders:
            if isinstance(loader, _FabricDataLoader):
                loader.numbers_samplers = True  # as in Lightning Fabric
                loader.seed_workers_by_rank(self.global_rank)
        return loaders if len(dataloaders) > 1 else result

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Within the context, modules are constructed on the strategy's device, in the precision's dtype."""
        return self.core.init_module(empty_init)

    def init_tensor(self) -> AbstractContextManager[None]:
        """Within the context, tensors are created on the device, in the precision's dtype."""
        return self.core.init_tensor()

    def sharded_model(self) -> AbstractContextManager[None]:
        """Not supported: a former name of `init_module`."""
        raise unsupported("fabric.sharded_model()", "Write `fabric.init_module()`.")

    def to_device(self, obj: T) -> T:
        """Move a module (in place) or a nest of tensors to this rank's device."""
        return self.core.to_device(obj)

    # The step

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's autocast, for operations outside a prepared model's forward."""
        return self.core.autocast()

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Run backward, and average the gradients of the models that were set up over the ranks."""
        if self._models or self._hooks:
            self.core.backward(tensor, *args, model=prepared(model), **kwargs)
        else:
            tensor.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Within the context, gradients of `module` are not synchronised."""
        inner = prepared(module)
        assert inner is not None
        return self.core.no_backward_sync(inner, enabled)

    def clip_gradients(
        self,
        module: nn.Module | None,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of one optimizer, by value, or by their norm over all shards. `module=None`: the module
        whose parameters it steps."""
        return self.core.clip_gradients(
            self._model_of(module, optimizer), [optimizer], clip_val, max_norm, norm_type, error_if_nonfinite
        )

    # Collectives

    def barrier(self, name: str | None = None) -> None:
        """Return once all ranks have called it."""
        self.core.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast an object from rank `src`. Ranks: all call it."""
        return self.core.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """All-gather tensors: `(*S)` -> `(W, *S)`; with one rank `(*S)`, as that library does."""
        tensors = self.core.to_device(_tensors(data))
        ranks = _collective(group)
        return tensors if self._size_of(ranks) == 1 else self.core.all_gather(tensors, ranks, sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """All-reduce tensors, in place as that library does, and return them.

        Raises: TypeError: the mean of integer tensors, which cannot hold it.
        """
        tensors = self.core.to_device(_tensors(data))
        operation, ranks = reduction(reduce_op), _collective(group)
        if self._size_of(ranks) == 1:
            return tensors
        given = _listed(tensors)
        for tensor in given if operation == "mean" else ():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise TypeError(
                    f"`all_reduce(..., reduce_op='mean')` of a tensor of {tensor.dtype}: it is reduced in place, and "
                    "cannot hold fractions. Pass `tensor.float()`, or write `reduce_op='sum'`."
                )
        for tensor, result in zip(given, _listed(self.core.all_reduce(tensors, ranks, operation)), strict=True):
            tensor.detach().copy_(result)
        return tensors

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Let rank zero (of each node, if `local`) run the block before the others."""
        return self.core.rank_zero_first(local)

    # Saving

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write one file, which `torch.load` reads: rank 0 gathers the state. With `state_dict_type="sharded"` or
        `save_distributed_checkpoint=True` each rank writes its shards into a folder, as `fabric.Fabric.save` does.

        Loaders without a position are omitted. Ranks: all call it.
        """
        plain = _unwrapped("save", state)
        if self._strategy.saves_shards:
            self.core.save(path, plain, filter)
        else:
            checkpoints, collective = self.core._connected.checkpoints, self.core._connected.runtime.collective
            with checkpoints.announced(path):
                content = gathered(collective, checkpoints.content(plain, filter))
                other_formats.save(collective, checkpoints.place(path, saves=True), content)

    def load(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a file into the objects of `state`, in place; returns the entries that `state` does not name."""
        _check_weights_only("load", weights_only)
        if state is None:
            return self.core.load(path, None, strict)
        plain = _unwrapped("load", state)
        before = dict(plain)
        rest = self.core.load(path, plain, strict, resume_loaders=False)
        state.update({name: value for name, value in plain.items() if value is not before[name]})
        return rest

    def load_raw(
        self, path: str | os.PathLike[str], obj: Any, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Load a file with the state dict of one module or optimizer."""
        _check_weights_only("load_raw", weights_only)
        self.core.load_raw(path, unwrap(obj), strict)

    # Logging

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on rank zero only."""
        self.core.print(*args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log one metric to every logger, on rank zero."""
        self.core.log(name, value, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics to every logger, on rank zero."""
        self.core.log_dict(metrics, step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it, with the keyword arguments that it accepts."""
        for method in methods(self._callbacks, hook_name):
            method(*args, **_accepted(method, kwargs))

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed Python, NumPy and torch; None is 0."""
        return seed_everything(seed, workers, verbose)

    # Internals

    def _size_of(self, ranks: Collective | None) -> int:
        return self.core.world_size if ranks is None else ranks.size

    def _ranks_end_with_function(self) -> bool:
        """Whether the ranks end when the launched function returns."""
        chosen = self.core._configuration
        if chosen.topology.size == 1 or chosen.world is not None:
            return False
        needs_function = chosen.launcher in LAUNCHERS and LAUNCHERS[chosen.launcher].needs_function
        return caller_that_continues() is not None or needs_function or "script" not in chosen.strategy.launchers

    def _watch(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._hooks.append(hook_steps(optimizer, after=self._stepped_by))

    def _stepped_by(self, optimizer: Optimizer, *_: Any) -> None:
        self.call("on_after_optimizer_step", strategy=self.strategy, optimizer=optimizer)

    def _model_of(self, module: nn.Module | None, optimizer: Optimizer) -> nn.Module:
        """The prepared module, or the first one whose parameters the optimizer steps."""
        inner = prepared(module)
        if inner is not None and any(model is inner for model in self._models):
            return inner
        for known, model in self._stepped:  # a backend may replace the parameters in the groups
            if known is optimizer:
                return model
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if any(id(parameter) in stepped for parameter in model.parameters()):
                return model
        raise ValueError(
            f"`clip_gradients`: the `{type(optimizer).__name__}` has no parameter of a model that was set up. Pass the "
            "model and the optimizer to `fabric.setup`."
        )


def _run(core: CoreFabric, fabric: Fabric, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    """Run the launched function, in a rank that ends after it."""
    fabric.core = core
    fabric._strategy = fabric._strategy.within(core)
    return function(fabric, *args, **kwargs)


def _inner(value: Any) -> Any:
    return prepared(value) if isinstance(value, nn.Module) else value


def _several(objects: Any) -> Sequence[Any]:
    return () if objects is None else objects if isinstance(objects, list | tuple) else (objects,)


def _accepted(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # the method is not written in Python
        return kwargs
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def _tensors(data: Any) -> Any:
    """The same nest, with numbers converted to tensors."""
    if isinstance(data, bool | int | float):
        return torch.tensor(data, dtype=torch.float32 if isinstance(data, float) else torch.int64)
    if isinstance(data, dict):
        return {key: _tensors(value) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(_tensors(value) for value in data)
    return torch.from_numpy(data) if type(data).__module__ == "numpy" and "shape" in dir(data) else data


def _listed(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in its order."""
    listed: list[Tensor] = []
    map_by_path(lambda path, tensor: listed.append(tensor), nest)
    return listed


def _collective(group: Any) -> Collective | None:
    if group is None or isinstance(group, Collective):
        return group
    raise unsupported(
        f"group={group!r}",
        "Leave it out for all ranks, or pass `fabric.collective.split([0, 1])`, which all ranks call.",
    )


def _unwrapped(method: str, state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`fabric.{method}(path, state)` was given a `{type(state).__name__}` as `state`. Pass a dict, such as "
            "`{'model': model}`."
        )
    plain: dict[str, Any] = unwrap(dict(state))
    return plain


def _check_weights_only(method: str, weights_only: bool | None) -> None:
    if weights_only is False:
        raise unsupported(
            f"fabric.{method}(weights_only=False)",
            "Leave it out: a checkpoint of `fabric.save` contains no pickled objects. For a file that was written "
            "otherwise, call `torch.load(path, weights_only=False)` and `load_state_dict` yourself.",
        )
