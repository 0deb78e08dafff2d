"""`Fabric`: the methods that a training loop calls, each delegated to the part that implements it.

It checks the order of calls (no collective before `launch`, nothing set up twice). It never asks for the strategy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.checks.nonfinite import OnNonfinite
from fabric.checks.sanitizer import Sanitize
from fabric.configure import method_arguments as arguments
from fabric.configure.explain import configure
from fabric.configure.parse import DEFAULT_REPORT_AFTER_SECONDS
from fabric.configure.request import Request
from fabric.launchers.world import World
from fabric.loop.accumulation import Window
from fabric.loop.backward import NO_MODEL
from fabric.loop.gather_parameters import gathered, gathered_for_forward
from fabric.loop.moving_average import MovingAverage
from fabric.loop.weighting import average_over_ranks
from fabric.output.logger import report_open_run
from fabric.output.output import Output
from fabric.session import Session
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.checkpoint.state import Filter, Stateful, is_stateful
from fabric.strategies.collectives import nested
from fabric.strategies.collectives.collective import Collective, ReduceOp
from fabric.strategies.collectives.fabric_calls_check import check_call
from fabric.strategies.collectives.rank_zero_broadcast import rank_zero_first
from fabric.strategies.data.partition import Uneven, Use
from fabric.strategies.data.transfer import move
from fabric.strategies.module.initialization import new_tensors
from fabric.strategies.precision.precision import Precision, autocast
from fabric.strategies.strategy import Strategy
from fabric.strategies.tensors.parameters import uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from fabric.configure.method_arguments import LoaderOptions
    from fabric.monitor.monitor import Monitor
    from fabric.strategies.checkpoint.write_and_commit import PendingSave

Folder: TypeAlias = str | os.PathLike[str] | None
T = TypeVar("T")
P = ParamSpec("P")
Key = TypeVar("Key")
Context: TypeAlias = AbstractContextManager[None]
Number = TypeVar("Number", bound=float)
Self = TypeVar("Self", bound="Fabric")
Module = TypeVar("Module", bound=nn.Module)
Optim = TypeVar("Optim", bound=Optimizer)
Optim2 = TypeVar("Optim2", bound=Optimizer)
Scheduler = TypeVar("Scheduler")
Loader = TypeVar("Loader", bound=Iterable[Any])
Loader2 = TypeVar("Loader2", bound=Iterable[Any])


class Fabric(Output):
    """Runs a PyTorch loop on any device, any number of processes, any sharding scheme. The loop stays the user's.

    The constructor checks all arguments before anything starts: what cannot be honoured raises ValueError or TypeError,
    with what to write instead.

    `accelerator`: auto, cpu, cuda, mps, xla, or another device that `torch.accelerator` knows.
    `strategy`: a name (see `fabric.strategies.available_strategies()`), or a `Strategy` with options of its own.
    `devices`: auto, a count, -1 for all, or the indices of the devices on this node. Inside a rank of a launched
    fabric, `devices=1` creates a separate world of one process, without collectives with the other ranks.
    `num_nodes`: the number of machines. `precision`: 64-true, 32-true, 16-true, bf16-true, 16-mixed, bf16-mixed.
    `plugins`: a custom `Precision`, `Environment` or `Check`.
    `callbacks`: objects whose methods `call` runs. `loggers`: objects that receive metrics.
    `launcher`: auto, script, fork, forkserver, spawn, elastic, external.
    `deterministic`: True (raise for an operation without a deterministic implementation), "warn", or False.
    `timeout_seconds`: how long a collective waits for the other ranks before it raises; None: the strategy's own value,
    half an hour by default.
    `report_after_seconds`: if a rank waits in one collective for longer, the job prints what each rank does.
    `stop_grace_seconds`: how long a rank that fabric started may go on after SIGTERM or Ctrl-C, before it is killed;
    None: 30 s, and as long as a `save` that is in progress takes.
    `sanitize`: in which steps of each optimizer the ranks compare, exactly, what they should have in common: weights,
    optimizer states, gradients, hyperparameters, and every collective before it runs. "start": steps 1 to 3, then 4, 8,
    16, ...; "always": every step; a number N: those of "start", and every N-th; False: none. Ranks that differ raise
    SanitizerError, or CollectiveError for a collective. Other steps cost nothing more.
    `log_dir`: a folder with one file for each rank, to which its stdout and stderr are copied, and the traceback with
    which it fails. `prefix_output`: show the rank before each line that it prints. Both need ranks that fabric starts.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: Any = "32-true",
        plugins: Any = (),
        callbacks: Any = (),
        loggers: Any = (),
        launcher: str = "auto",
        deterministic: Any = False,
        timeout_seconds: float | None = None,
        report_after_seconds: float = DEFAULT_REPORT_AFTER_SECONDS,
        stop_grace_seconds: float | None = None,
        sanitize: Sanitize = "start",
        log_dir: str | os.PathLike[str] | None = None,
        prefix_output: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self._request = request = Request.build(given, os.environ)
        self._configuration = configure(request, os.environ)
        super().__init__(request.callbacks, request.loggers)
        self._place: World | None = self._configuration.world  # set once this process is a rank, and kept after `close`
        self._session: Session | None = None  # between `launch` and `close`
        self.draws_apart = True
        """Whether ranks that read different data draw different random numbers, from the first batch or forward on, if
        all of them had the same generators. Read when the fabric is launched."""

    # Who and where

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._connected.runtime.device

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self._world.size

    @property
    def global_rank(self) -> int:
        """This process's rank over all nodes, from 0."""
        return self._world.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node, from 0."""
        return self._world.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node, from 0."""
        return self._world.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._world.is_global_zero

    @property
    def strategy(self) -> Strategy:
        """The strategy in use: how models are distributed over devices."""
        return self._configuration.strategy

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device."""
        return self._configuration.accelerator

    @property
    def precision(self) -> Precision:
        """The dtypes of parameters, of compute and of reductions."""
        return self._configuration.precision

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The device mesh; None if the strategy has none."""
        return self._connected.runtime.mesh

    @property
    def collective(self) -> Collective:
        """The collectives over all ranks, for custom parallelism. `split` creates a `group` for the methods below."""
        return self._connected.runtime.collective

    # Launching and closing

    @overload
    def launch(self, function: None = None) -> None: ...
    @overload
    def launch(self: Self, function: Callable[Concatenate[Self, P], T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Without a function: from the next line on, the script runs on every rank. With one: run
        `function(fabric, *args, **kwargs)` on every rank, and return the result of rank 0, its tensors on the CPU.

        Under an external launcher every process returns the result of its own rank.
        Raises: WorkerError: a rank raised, died, or exited without a result; the first failure is reported. Its
        `__cause__` is the exception of that rank. A sweep that expects it (optuna's `TrialPruned`) writes
        `except WorkerError as error: raise error.__cause__ or error`. One process raises the exception itself.
        """
        if self._session is not None:
            raise RuntimeError(
                "`fabric.launch()` was called twice: this process is a rank already. Call it once, before `setup`; "
                "after `fabric.close()` another fabric can be launched."
            )
        from fabric.launchers.choose import choose_launcher  # costs time, and only a process that launches needs it

        chosen = self._configuration
        launcher = choose_launcher(
            chosen.launcher,
            chosen.topology,
            function=function,
            world=self._place,
            max_restarts=chosen.max_restarts,
            device_type=chosen.accelerator.name,
        )
        if chosen.topology.size > 1 and self._place is None:
            report_open_run(sys.modules)
        if function is None:
            self._connect(launcher.enter())
            return None
        return launcher.launch(_run, self, function, args, kwargs)

    def close(self) -> None:
        """Destroy the process group, and restore the environment and the user's objects. A second call does nothing.

        Ranks: all call it when they are done; it waits for a save with `blocking=False`, and for the other ranks where
        a last step is compared (`sanitize`).
        Raises: CheckpointError: that save failed, and this was not raised before.
        """
        if self._session is not None:
            try:
                self._session.close()
            finally:
                self._session = None

    def __enter__(self) -> Fabric:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Fabric:
        return self  # a copy of a model that refers to its fabric refers to the same one

    def __getstate__(self) -> dict[str, Any]:
        if self._session is not None:
            raise TypeError(
                "A launched `Fabric` cannot be pickled, as for a worker of a `DataLoader` that is not forked, or by "
                "`torch.save(module)`: it is connected to the other ranks. Keep what the object needs instead, such as "
                "`fabric.global_rank`, and save modules by `fabric.save`."
            )
        return vars(self)

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        if exception is not None and self._session is not None:
            self._session.explain(exception)
            self._session.moments.clear()
        self.close()

    # Preparing

    @overload
    def setup(self, module: Module, *, scheduler: None = None, move_to_device: bool = True) -> Module: ...
    @overload
    def setup(
        self, module: Module, *, scheduler: Scheduler, move_to_device: bool = True
    ) -> tuple[Module, Scheduler]: ...
    @overload
    def setup(
        self, module: Module, optimizer: Optim, /, *, scheduler: None = None, move_to_device: bool = True
    ) -> tuple[Module, Optim]: ...
    @overload
    def setup(
        self, module: Module, optimizer: Optim, /, *, scheduler: Scheduler, move_to_device: bool = True
    ) -> tuple[Module, Optim, Scheduler]: ...
    @overload
    def setup(
        self, module: Module, first: Optim, second: Optim2, /, *, scheduler: None = None, move_to_device: bool = True
    ) -> tuple[Module, Optim, Optim2]: ...
    @overload
    def setup(
        self, module: Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any: ...
    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any:
        """Prepare a model and its optimizers; returns the module, or a tuple of module, optimizers and scheduler.

        Returns the user's own objects wherever the strategy allows it. Ranks: all call it.
        Weights are broadcast from rank 0. `optimizer.step_was_skipped` is True after a step that the loss scaler
        skipped because gradients overflowed in float16. A parameter of an optimizer that belongs to no module (a
        temperature) is averaged like the others.
        From the first batch of a prepared loader or the next forward on, ranks that read different data draw different
        random numbers (dropout, noise), and ranks that hold parts of one model draw the same, both by the seed.
        Raises: ValueError: an object was set up before, or the strategy does not support a parameter of an optimizer.
        CollectiveError: on every rank, if the names, shapes or dtypes of its tensors differ over ranks (not `manual`).
        """
        arguments.check_module(module)
        arguments.check_optimizers(optimizers)
        session = self._connected
        prepared = session.objects.model(module, optimizers, move=move_to_device)
        session.objects.schedulers += [ref(scheduler)] if is_stateful(scheduler) else []
        session.backward.models_changed()
        results = (prepared.module, *prepared.optimizers, *(() if scheduler is None else (scheduler,)))
        return results if len(results) > 1 else prepared.module

    def setup_module(self, module: Module, move_to_device: bool = True) -> Module:
        """Prepare a model without optimizers: for inference, or to create the optimizers from the returned module."""
        return self.setup(module, move_to_device=move_to_device)

    @overload
    def setup_optimizers(self, optimizer: Optim, /) -> Optim: ...
    @overload
    def setup_optimizers(self, first: Optim, second: Optim2, /) -> tuple[Optim, Optim2]: ...
    @overload
    def setup_optimizers(self, *optimizers: Optimizer) -> Any: ...
    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers of models that were set up before; returns the optimizer, or a tuple in their order."""
        if not optimizers:
            raise ValueError("`fabric.setup_optimizers()` was given no optimizer. Pass at least one.")
        arguments.check_optimizers(optimizers)
        session = self._connected
        session.objects.later_optimizers(optimizers)
        session.backward.models_changed()
        return optimizers[0] if len(optimizers) == 1 else optimizers

    @overload
    def setup_dataloaders(self, loader: Loader, /, **options: Unpack[LoaderOptions]) -> Loader: ...
    @overload
    def setup_dataloaders(
        self, first: Loader, second: Loader2, /, **options: Unpack[LoaderOptions]
    ) -> tuple[Loader, Loader2]: ...
    @overload
    def setup_dataloaders(self, *loaders: Iterable[Any], **options: Unpack[LoaderOptions]) -> Any: ...
    def setup_dataloaders(
        self,
        *loaders: Iterable[Any],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        use: Use | None = None,
        uneven: Uneven | None = None,
    ) -> Any:
        """Split the data over the ranks, and move batches to the device; returns the loader, or a tuple in order.

        The user's loader is neither changed nor constructed again. `use`: train (default), validate, test or predict.
        `use_distributed_sampler=False`: every rank reads its loader as it is.
        `uneven`: what ranks that train on streams of different lengths do when the first stream ends: "stop" together
        (the default, with a message), or "repeat" their last batch until all streams have ended. A repeated batch
        counts zero in `fabric.backward`, with and without `weight=`: gradients are those of the ranks that still have
        data (after `loss.backward()`, which would count it, a step raises). The ranks exchange messages to agree on
        who has data, so every rank must iterate, and leave its loop at the same step; for a loop on some ranks only,
        use another `use` than 'train'. With `use_distributed_sampler=False` this happens only if `uneven` is given. In
        evaluation ranks may have different numbers of batches, except under strategies that gather parameters in
        forward: there "repeat" evaluates all data, and without it different numbers are an error.
        Data that is already split for this rank (`DistributedSampler`, `split_dataset_by_node` of a stream,
        webdataset's `split_by_node`, any sampler with a rank) is not split again. A map-style dataset that was split
        before (`datasets.Dataset.shard`, `Subset`) cannot be recognised: it raises if the ranks' datasets differ.
        Draws from no random generator. Ranks: all call it.
        Raises: ValueError: the data cannot be split, is split for another rank, or differs between ranks.
        """
        if not loaders:
            raise ValueError("`fabric.setup_dataloaders()` was given no loader. Pass at least one.")
        arguments.check_loader_options(use, uneven)
        session = self._connected
        runtime = replace(session.runtime, layout=session.objects.layout, uneven=uneven)
        if uneven == "repeat" and use in (None, "train"):
            session.accumulation.expect_repeated(session.objects.optimizers)
        process, how = self.strategy.process_dataloader, {"distribute": use_distributed_sampler, "move": move_to_device}
        prepared = tuple(process(runtime, loader, use or "train", **how) for loader in loaders)
        session.objects.add_loaders(prepared, is_split=use_distributed_sampler)
        return prepared[0] if len(prepared) == 1 else prepared

    def is_wrapped(self, obj: object) -> bool:
        """Whether this fabric prepared the module, optimizer or loader."""
        return self._session is not None and self._session.objects.holds(obj)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Context: modules are created on the device that the strategy needs, in the precision's dtype. With
        `empty_init=True` their parameters are initialised in `setup`, by `reset_parameters` of submodules, unless they
        are loaded before. Load a checkpoint before or after `setup`."""
        return self.strategy.init_module(self._connected.runtime, empty=bool(empty_init))

    def init_tensor(self) -> AbstractContextManager[None]:
        """Context: tensors are created on the device, in the precision's dtype."""
        return new_tensors(self.device, self.precision)

    def to_device(self, obj: T) -> T:
        """Move a module (in place) or nested containers of tensors to this rank's device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else move(obj, self.device)

    # The step

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's autocast, for operations outside a prepared model's forward."""
        return autocast(self.precision, self.device)

    def backward(
        self,
        loss: Tensor,
        *args: Any,
        model: nn.Module | Sequence[nn.Module] | None = None,
        weight: float | Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Compute gradients, averaged over the ranks.

        `weight`: the number of samples or tokens that this rank's loss is a sum over; may be zero. After the window
        (all backwards up to a synchronised one: `accumulate`, `no_backward_sync`) the gradients are the sum of all
        losses' gradients over all ranks, divided by the sum of all weights; zero if all weights are zero. Clipping and
        the optimizer use these gradients. Costs one scalar all-reduce per window at most. In a window, either all
        backwards have a weight or none has.
        `model`: the model or models that the loss goes through. Required if each model has an engine of its own, and
        for `weight` if several models are set up.
        Further arguments go to `Tensor.backward`. Ranks: all call it, unless within `no_backward_sync`.
        """
        if self._session is None:
            raise RuntimeError(f"`fabric.backward(loss)` {NO_MODEL}")
        self._session.backward.run(loss, model, weight, args, kwargs)

    def accumulate(self, batches: Iterable[T], num_batches: int, *models: nn.Module) -> Iterator[Window[T]]:
        """Yield windows of `num_batches` micro-batches, one optimizer step each; the last one may be shorter.

            for window in fabric.accumulate(loader, 8):
                for tokens, targets in window:
                    loss = cross_entropy(model(tokens), targets, reduction="sum")
                    fabric.backward(loss, weight=len(targets))
                optimizer.step()
                optimizer.zero_grad()

        Gradients of `models` (default: all that are set up) are synchronised in the last micro-batch of a window only;
        the others run as within `no_backward_sync`. The last one is found by reading one micro-batch ahead, never
        beyond the window, so loaders need no length. `len(window)` is the number of its micro-batches, if the loader
        has a length. After a `break` out of a window, discard its gradients with `optimizer.zero_grad()`; a step with
        gradients that were not synchronised raises RuntimeError.
        Ranks: all, with the same number of windows; windows may differ in length between ranks.
        """
        arguments.check_window(num_batches)
        objects, accumulation = self._connected.objects, self._connected.accumulation
        prepared = tuple(objects.prepared(each, "accumulate") for each in models) or tuple(objects.models.values())
        if not prepared:
            raise RuntimeError(f"`fabric.accumulate(...)` {NO_MODEL}")
        accumulation.guard(objects.optimizers)
        unsynced = partial(accumulation.unsynced, prepared, objects.bare or None)
        return accumulation.windows(batches, num_batches, unsynced)

    def average_gradients(self, parameters: Iterable[Tensor], weight: float | Tensor | None = None) -> None:
        """Average `.grad` of the parameters over the ranks, in place, for a model that was not set up: call it between
        `loss.backward()` and `optimizer.step()`.

        Small gradients are packed into one message. If only some ranks have a gradient, the others count as zero; if no
        rank has one, it stays None. `weight`: the number of samples that this rank's loss is a sum over; the gradients
        are then their sum over all ranks divided by the sum of the weights, as after `backward(weight=...)`. Parameters
        must start from equal values: `module.load_state_dict(fabric.broadcast(module.state_dict()))`.
        Ranks: all, with the same parameters in the same order.
        Raises: ValueError: a parameter is sharded, or of a model that was set up. RuntimeError: a gradient is sparse.
        """
        given, session = list(parameters), self._connected
        session.objects.refuse_averaged(given)
        average_over_ranks(session.runtime, given, weight)
        for moment in session.moments.gradients_averaged:
            moment(given)

    def ema(self, module: nn.Module, decay: float = 0.999) -> MovingAverage:
        """Create an exponential moving average of a prepared model's weights, sharded like the weights.

            average = fabric.ema(model, decay=0.999)
            ...
                optimizer.step()
                average.update()
            with average.applied():  # the model's weights are the averages
                evaluate(model)
            fabric.save(path, {"model": model, "average": average})

        It starts from the present weights, under DeepSpeed from those in float32 that its optimizer trains, and
        averages in its first `update`, too, where torch's `AveragedModel` copies. In a checkpoint it is as portable as
        the model. Ranks: all.
        Raises: ValueError: weights are in half precision, decay is not in [0, 1), or the strategy does not support it.
        """
        prepared = self._connected.objects.prepared(module, "ema")
        if "ema" in self.strategy.lacks:
            raise ValueError(self.strategy.lacks["ema"])
        return MovingAverage(prepared, decay, self._connected.runtime.collective)

    def gathered(self, module: nn.Module, *, write: bool = False, for_forward: bool = False) -> Context:
        """Context: the parameters of a prepared model, or of a submodule of it, are whole, also where the strategy has
        them in shards. For what reads weights outside of forward, such as a penalty in the loss:

            loss = criterion(model(x), y)
            with fabric.gathered(model):
                loss = loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())
            fabric.backward(loss)

        There they are copies of the shards, through which gradients flow, averaged over the ranks as those of forward;
        elsewhere the parameters themselves. Do not call the model within, unless `for_forward`.
        `write=True`: for what changes weights, such as a mask after a step. Every rank writes the same values:

            optimizer.step()
            with torch.no_grad(), fabric.gathered(model, write=True):
                model.head.weight.mul_(mask)

        At its end the ranks compare what they have, and write it into the shards and into the weights that an engine
        trains. `model.state_dict()` is whole within, and `model.load_state_dict(whole)` is right in the second form.
        After an exception within, nothing is written into shards.
        `for_forward=True`: the model may be called, and generate, without gradients and without messages: ranks may
        run different numbers of forwards. Memory: the whole model, on every rank.
        Ranks: all, with the same module. Otherwise memory: the copies, until backward if they are in the loss.
        Raises: RuntimeError: a copy was changed in place without `write=True`; or, on every rank, ranks have written
        other values, such as rank 0 alone.
        """
        inner, session = uncompiled(module), self._connected
        model = next((each for each in session.objects.models.values() if each.holds(inner)), None)
        if for_forward:
            return gathered_for_forward(inner, model, session.runtime, write=write)
        is_alike = (session.runtime.layout if model is None else model.layout).weights != "any"
        return gathered(inner, model, self.collective, is_alike=is_alike, write=write)

    def find_batch_size(self, function: Callable[[int], object], *, start: int = 1, most: int = 2**16) -> int:
        """The largest batch size up to `most` with which `function(batch_size)` fits into memory on every rank.

            def run(batch_size):
                fabric.backward(model(torch.zeros(batch_size, 512, dtype=torch.long, device=fabric.device)).mean())

        Collectives within send nothing: each is answered as if all ranks were this one. Memory, buffers, generators
        and loaders are as before. Ranks: all, while parameters have no gradients, as after `optimizer.zero_grad()`.
        Raises: OutOfMemoryError: 1 does not fit; ValueError: a forward needs the other ranks, as in a pipeline.
        """
        return self._connected.find_batch_size(function, start, most)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Context: forward and backward of `module` do not synchronise gradients. For gradient accumulation: run the
        last micro-batch outside of it, or with `enabled=False`."""
        objects, accumulation = self._connected.objects, self._connected.accumulation
        prepared = objects.prepared(module, "no_backward_sync")
        if not enabled:
            return nullcontext()
        if self.world_size > 1:
            accumulation.guard(objects.optimizers)
        return accumulation.unsynced([prepared], objects.bare or None)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip each gradient to `[-clip_val, clip_val]`, or scale all so that their norm over all shards is `max_norm`.

            fabric.clip_gradients(model, max_norm=1.0)  # all of the model, by one norm
            fabric.clip_gradients(model, [first], max_norm=1.0)  # those of one of its two optimizers alone

        `optimizer`: None: the gradients of all parameters of the model that optimizers step, by their common norm.
        Several: those of these, together. One: those of this one, which must be all of the model's.
        Returns the norm before clipping, for `max_norm`; of half precision in float32. Under a precision that scales
        losses, gradients are unscaled first, and a norm that is not finite skips the next step of all these optimizers
        instead of raising.
        On an accelerator `error_if_nonfinite=True` waits for the device once: the error comes before weights change.
        With False nothing waits, and a norm that is not finite makes all gradients NaN, and with the step all weights.
        Raises: ValueError: one optimizer, not in a list, of several that step the model; an optimizer of another model.
        """
        arguments.check_limits(clip_val, max_norm)
        session = self._connected
        prepared = session.objects.prepared(module, "clip_gradients")
        optimizers = session.objects.clipped_together(prepared, optimizer)
        if clip_val is not None:
            prepared.clip_value(optimizers, float(clip_val))
            return None
        assert max_norm is not None
        return session.clip_norm(prepared, optimizers, float(max_norm), float(norm_type), raises=error_if_nonfinite)

    def guard_gradients(self, on_nonfinite: OnNonfinite | None) -> None:
        """From now on, an optimizer step whose gradients are not finite raises, or is skipped, on all ranks alike.

            fabric.guard_gradients("skip")
            for batch in loader:
                ...
                optimizer.step()
                if optimizer.step_was_skipped:
                    ...

        "raise": NonFiniteGradientsError from `optimizer.step()`, before weights or optimizer change. "skip": the step
        changes nothing but the gradients, which become None, and a message says so. Both name the ranks whose loss was
        not finite. None: no check. It holds for all optimizers, also for those set up later. `clip_gradients` then
        returns a norm that is not finite instead of raising. A loss scaler skips and adapts as before; a step counts
        once its scale is 1 or less.
        No message is sent for the check where all ranks hold the same gradients, after `clip_gradients(max_norm=...)`,
        and with a loss scaler; otherwise one flag is.
        Ranks: all. Raises: ValueError: another word.
        """
        arguments.check_word("guard_gradients", "on_nonfinite", on_nonfinite, OnNonfinite)
        self._connected.guard_gradients(on_nonfinite)

    # Collectives

    def barrier(self, name: str | None = None) -> None:
        """Return once all ranks have called it. `name` documents the call and is not used.

        Raises: CollectiveError: other ranks made another call.
        """
        check_call(self.collective, "barrier")  # an all-reduce: no rank has it before all have come

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src` on every rank. Tensors are sent as tensors, all else pickled. Ranks: all."""
        return self.collective.broadcast_object(obj, src)  # type: ignore[no-any-return]

    @overload
    def all_gather(
        self, data: Tensor | complex, group: Collective | None = None, sync_grads: bool = False
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, data: dict[Key, Number], group: Collective | None = None, sync_grads: bool = False
    ) -> dict[Key, Tensor]: ...
    @overload
    def all_gather(
        self, data: list[Number], group: Collective | None = None, sync_grads: bool = False
    ) -> list[Tensor]: ...
    @overload
    def all_gather(self, data: T, group: Collective | None = None, sync_grads: bool = False) -> T: ...
    def all_gather(self, data: Any, group: Collective | None = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked, in the same nested containers: `(*S)` -> `(W, *S)`, also for W = 1.

        `sync_grads`: backward sends each rank the sum over the group of the gradients of its tensor. Ranks: all of the
        group (None: all ranks); with `sync_grads` each must have samples of its own.
        Raises: CollectiveError on every rank: the ranks' data differs in paths, dtypes or shapes; the message has what
        each rank passed. Tensors on an accelerator are not waited for: they raise in the next call. ValueError:
        `sync_grads` without a group, if some ranks read the same samples.
        For the values of an evaluation: `gather_for_metrics`.
        """
        lacks = self.strategy.lacks if sync_grads and group is None and self.world_size > 1 else {}
        if "gather_gradients" in lacks:
            raise ValueError(lacks["gather_gradients"])
        return nested.all_gather(self._ranks(group), data, sync_grads=sync_grads)

    @overload
    def all_reduce(
        self, data: Tensor | complex, group: Collective | None = None, reduce_op: ReduceOp = "mean"
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, data: dict[Key, Number], group: Collective | None = None, reduce_op: ReduceOp = "mean"
    ) -> dict[Key, Tensor]: ...
    @overload
    def all_reduce(
        self, data: list[Number], group: Collective | None = None, reduce_op: ReduceOp = "mean"
    ) -> list[Tensor]: ...
    @overload
    def all_reduce(self, data: T, group: Collective | None = None, reduce_op: ReduceOp = "mean") -> T: ...
    def all_reduce(self, data: Any, group: Collective | None = None, reduce_op: ReduceOp = "mean") -> Any:
        """Return the reduction (mean, sum, min, max, product) of all ranks' tensors, in the same nested containers. The
        mean of integers is a float tensor. Ranks: all of the group.

        Raises: CollectiveError on every rank: the ranks' data differs in paths, dtypes or shapes; the message has what
        each rank passed. Tensors on an accelerator are not waited for: they raise in the next call.
        """
        return nested.all_reduce(self._ranks(group), data, reduce_op)

    def gather_for_metrics(self, values: Sequence[T], loader: Iterable[Any]) -> T:
        """Return the values of every sample of the last iteration over a prepared loader, each once, in the order in
        which one process reads them: that of the dataset, unless the loader shuffles.

            values = []
            for x, y in loader:
                values.append((model(x).argmax(dim=1), y))
            predictions, targets = fabric.gather_for_metrics(values, loader)

        `values`: for each batch, nested containers of tensors and numbers. Shapes: `(N_i, *S)` for each batch, N_i its
        samples or tokens -> `(N, *S)`, N their sum over all batches of all ranks; `()` for each batch -> `(B,)`, one
        for each. Values of repeated batches (`uneven="repeat"`) are left out; of ranks that read the same batches, one.
        Ranks: all call it once, after the loop; they may have different numbers of batches, or none. With
        `use_distributed_sampler=False` the values of every rank count. Gradient: none.
        Raises: RuntimeError: the iteration has not ended, or was left by `break`. ValueError: there is not one value
        per batch, or values of batches differ in more than lengths. CollectiveError: those of ranks do.
        """
        from fabric.loop.gather_for_metrics import gather_for_metrics

        runtime = self._connected.runtime
        return gather_for_metrics(runtime.collective, runtime.share, values, loader)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Context: rank zero (of each node, if `local`) runs the block before the others. If it raises, all raise."""
        return rank_zero_first(self.collective, self._world, local=local)

    # Saving

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps of this run, without skipped ones; `load` restores it if it resumes a run.

        With several optimizers: of the one that has stepped most.
        """
        return 0 if self._session is None else self._session.objects.num_steps

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Filter | None = None,
        blocking: bool = True,
        after_commit: Callable[[], object] | None = None,
    ) -> PendingSave:
        """Write modules, optimizers, other objects with a `state_dict`, and plain values to a folder, atomically.

        Each rank writes its part; any strategy with any number of ranks can load it. The previous checkpoint at `path`
        stays until the new one is complete and on disk. `path`: a path on a disk that all ranks share, or a URL for
        fsspec. `filter`: for a name in `state`, a function `(key, value) -> bool` that selects what is saved; the value
        is on the device "meta" if other ranks have shards or copies of it. A data loader without a `state_dict` is left
        out, with one message. Unless `state` has only plain values, the entry `"fabric"` is added: the random
        generators of every rank, the loss scales, the schedulers passed to `setup`, the number of steps of each
        optimizer, and the positions of prepared loaders that `state` does not name.
        Save after a step, not within a window of micro-batches: gradients are not saved.
        `blocking=False`: returns once everything is copied; a thread on each rank writes the copies. `wait()` of the
        result, the next `save` or `load`, and `close` wait for it and raise its error. The copies take as many bytes as
        the rank writes, and their memory is kept for the next save; from an accelerator, a blocking save copies, too.
        `after_commit`: called on rank 0 once the checkpoint is complete, in that thread if there is one.
        Ranks: all; each receives about 10 KB of generator states from every other.
        Raises: CheckpointError: on every rank, if any rank could not write, or if the previous save failed and this was
        not raised before. TypeError: a value has a type that could not be read back without running code.
        """
        return self._connected.checkpoints.save(path, state, filter, after_commit, blocking=blocking)

    def wait_for_save(self) -> None:
        """Wait for the save with `blocking=False`, if there is one. Any rank may call it, alone.

        Raises: CheckpointError: it failed, and this was not raised before.
        """
        if self._session is not None:
            self._session.checkpoints.wait()

    def load(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any] | None = None,
        strict: bool = True,
        *,
        resume_loaders: bool = True,
    ) -> dict[str, Any]:
        """Load a checkpoint into the objects of `state`, in place; returns the entries that `state` does not name.

        If `state` has an optimizer or a prepared loader, this resumes the saved run: random generators, loss scales,
        schedulers, `num_steps` and the positions of prepared loaders are restored too, at the end of this call; a
        message says so if the checkpoint has none. Otherwise they are not changed. Loaders that neither state names are
        matched in the order in which they were set up, before this call; a message says which of them continue within
        an epoch, or why they cannot. `resume_loaders=False`: they are not restored. If the number of ranks that read
        different data has changed, all ranks start from rank 0's generators, until the next batch or forward (see
        `setup`). Also reads a file of `torch.save` with the same names. Checksums are verified before any object is
        changed.
        `strict=False` loads modules with other names, and leaves out what the checkpoint lacks, with a message. Shapes
        must be equal anyway.
        Ranks: all. Raises: CheckpointError on every rank: a rank could not read, found damaged bytes, or names or
        shapes differ; the message has a table of them, and nothing was changed.
        """
        return self._connected.checkpoints.load(path, state, strict=strict, resume_loaders=resume_loaders)

    def load_raw(self, path: str | os.PathLike[str], obj: Stateful, strict: bool = True) -> None:
        """Load the state dict of one object: `torch.save(net.state_dict(), path)`, an index of such files, safetensors.

        For safetensors `path` is a file, an index of several (`model.safetensors.index.json`), or a folder with one of
        these; each rank reads the parts that it needs, and a name that is tied to one in the file may be missing.
        Runs no code from the files. Ranks: all. Raises: CheckpointError: on every rank, if a rank could not read it.
        """
        self._connected.checkpoints.load_raw(path, obj, strict=strict)

    def weights(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 64 * 2**20,
        prefix: str = "",
        *,
        dequantize: bool = False,
        merge_adapters: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the names and the whole tensors of `fabric.state_dict(model)`, a few at a time, on every rank:

            for name, tensor in fabric.weights(model, torch.bfloat16):
                if fabric.is_global_zero:
                    engine.update(name, tensor)

        Tensors are new, on this rank's device; a tied one comes once, under its first name. `dtype`: of floating-point
        tensors. `prefix`: of each name. `dequantize`: quantised weights as plain tensors. `merge_adapters`: peft's
        adapters merged into the weights. A bucket of `bucket_bytes`, or of one larger tensor, is gathered before its
        first tensor is yielded. A rank that leaves its loop takes part in the buckets that others read. No step within.
        Ranks: all, with the same arguments. Memory: a bucket and a half, and the tensors that the loop holds.
        """
        inner, checkpoints = uncompiled(model), self._connected.checkpoints
        return checkpoints.weights(inner, dtype, bucket_bytes, prefix, dequantize, merge_adapters)

    @overload
    def state_dict(self, model: nn.Module, optimizer: None = None, *, all_ranks: bool = False) -> dict[str, Any]: ...
    @overload
    def state_dict(
        self, model: nn.Module, optimizer: Optimizer, *, all_ranks: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def state_dict(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, all_ranks: bool = False
    ) -> dict[str, Any] | tuple[dict[str, Any], dict[str, Any]]:
        """The state of a model, or of a model and an optimizer, as one process of plain PyTorch would have it.

        Tensors are plain, whole, on the CPU, and copies; keys are the user's parameter names, and the optimizer's those
        of `optimizer.state_dict()`. Rank 0 has it; the dictionaries of the other ranks are empty, unless `all_ranks`.
        Ranks: all. Memory: where it is kept, the whole state on the CPU; beside it, on every rank, one whole tensor of
        the model or of the optimizer's state at a time.
        """
        objects = (model,) if optimizer is None else (model, optimizer)
        states = self._connected.checkpoints.state_dict(*objects, all_ranks=all_ranks)
        return states[0] if optimizer is None else (states[0], states[1])

    # Stopping

    @property
    def should_stop(self) -> bool:
        """True on every rank at the same step, after SIGTERM, SIGUSR1, Ctrl-C or `request_stop()` on any rank.

        Ranks: all read it once per step. After the first read, they do not end the process; a second Ctrl-C does.
        """
        return self._connected.stop.reached()

    def request_stop(self) -> None:
        """Make `should_stop` True on all ranks. Any rank may call it, alone."""
        self._connected.stop.request()

    # Looking at the run

    def trace(self, steps: range, folder: Folder = None) -> None:
        """Trace these optimizer steps on every rank with torch's profiler, into one file that Perfetto opens.

            fabric.trace(steps=range(10, 12))  # before the loop: steps 10 and 11, counted from 1

        `folder`: of `trace-10-11.json.gz` and of its summary; by default `log_dir`, or else the current one. After the
        last step the ranks wait for the device, and send their events to rank 0. Other steps cost one call at most.
        Ranks: all. Raises: ValueError: the steps are no range of steps to come.
        """
        from fabric.report.trace import Trace

        session = self._connected
        session.moments.add(Trace(steps, Path(folder or self._request.log_dir or "."), session))

    def monitor(self, folder: Folder = None, *, window_steps: int | None = None, show: bool = True) -> Monitor:
        """Measure from here on, on every rank: rates, MFU, where the time of a step goes, memory, the slow rank.

        After each window of steps (`window_steps`; None: of 5 s) rank 0 shows a table (`show`), logs the numbers under
        `monitor/`, and writes `monitor.jsonl` in `folder`, by default `log_dir`. Cost: six calls of Python a step, one
        all-gather a window. Ranks: all. Raises: OSError: rank 0 cannot write. RuntimeError: there is one already.
        """
        from fabric.monitor.monitor import Monitor

        monitor = Monitor(self._connected, self._loggers, folder, window_steps, show=show)
        self._connected.moments.add(monitor)
        return monitor

    # Internals

    @property
    def _world(self) -> World:
        return self._place or self._connected.runtime.world

    @property
    def _connected(self) -> Session:
        """The session. In a world of one, the first call that needs it makes it."""
        if self._session is None:
            if (self._place or self._configuration.topology).size > 1:
                raise RuntimeError(
                    "This call needs the ranks, which do not exist yet. Call `fabric.launch()` once, right after "
                    "`Fabric(...)`; with several ranks nothing can be prepared or communicated before it."
                )
            return self._connect(self._place or World())
        return self._session

    def _connect(self, world: World) -> Session:
        """Make this process a rank: afterwards it has a device and a collective."""
        chosen, request = self._configuration, self._request
        self._session = session = Session(world, chosen, request, os.environ, draws_apart=self.draws_apart)
        self._place = world if world.size > 1 else None
        session.begin()
        return session

    def _ranks(self, group: Collective | None) -> Collective:
        """The collective of a call. Raises: TypeError: the group is something else."""
        arguments.check_group(group)
        return group or self.collective


def _run(world: World, fabric: Fabric, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Run the function of `launch(function)` on this rank."""
    fabric._connect(world)
    try:
        result: T = move(function(fabric, *args, **kwargs), torch.device("cpu"))
    except BaseException as error:
        if fabric._session is not None:
            fabric._session.explain(error)
        if world.size == 1:  # otherwise the process ends, and the connection must outlive the error report
            fabric.close()
        raise
    fabric.close()
    return result
