"""Run the schedule of a pipeline: what `model(inputs, target)` does on every rank.

The only file that uses torch's schedules. A schedule runs backward itself, but the user's loop calls `backward` on a
loss. So the gradients of the schedule are removed from `.grad`, and attached to the loss.

# Note [One autograd node from the loss to the weights]
The returned loss is the output of an autograd function whose inputs are this rank's parameters. Its backward multiplies
the gradients of the schedule by the gradient of the loss, and returns them. By the chain rule that is exact whatever
the user computes from the loss: a division by the number of micro-batches of an accumulation window, a loss scale, a
sum with other losses. Gradients that were in `.grad` before are removed meanwhile, because torch's `scale_grads` would
scale them.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from fabric.strategies.collectives.collective import Collective
from fabric.strategies.collectives.fabric_calls_check import check_call
from fabric.strategies.gradients.sync import NOT_ALONE, Finish, GradientSync
from fabric.strategies.model_parallel.pipeline.options import OF_ONE_STAGE, Pipeline
from fabric.strategies.model_parallel.pipeline.split import Stage
from fabric.strategies.module.forward import ForwardPath
from fabric.strategies.module.initialization import UninitializedTensors
from fabric.strategies.module.output_tensors import replace_tensors
from fabric.strategies.module.parameter_changes import AddedParameters
from fabric.strategies.precision.precision import autocast, cast_inputs, cast_output, casts
from fabric.strategies.runtime import Runtime
from fabric.strategies.sharding.fully_shard import fsdp_modules
from fabric.strategies.sharding.sharded_gradient_sync import MeshAveraging
from fabric.strategies.tensors.digest import digest_of_all
from fabric.strategies.tensors.dtensor import local_part
from fabric.strategies.tensors.nests import map_only_tensors, tensors_in
from fabric.strategies.tensors.packing import Spec


@dataclass(frozen=True, slots=True)
class _Batch:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None

    def tensors(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs, self.target))


@final
class PipelineGradientSync(GradientSync):
    """The stages of one model on this rank, and their schedules: `forward` runs a whole schedule, backward included.

    `line`: the ranks of the axis "pipeline". `peers`: the ranks with the same stages. Ranks: all construct and call it.
    """

    def __init__(
        self,
        options: Pipeline,
        runtime: Runtime,
        module: nn.Module,
        stages: Sequence[Stage],
        uninitialized: UninitializedTensors,
        line: Collective,
        peers: Collective,
    ) -> None:
        self.options, self.runtime, self.stages = options, runtime, stages
        self.uninitialized, self.line, self.peers = uninitialized, line, peers
        self.holds_first = any(stage.index == 0 for stage in stages)
        self.holds_last = any(stage.index == options.num_stages - 1 for stage in stages)
        parts = nn.ModuleDict({f"stage {stage.index}": stage.module for stage in stages})
        self.averaging = MeshAveraging(runtime, parts)
        self.parameters = [parameter for parameter in self.averaging.parameters if parameter.requires_grad]
        self.sharded = fsdp_modules(parts)
        self.additions = AddedParameters(module, by_name=bool(self.sharded))
        self.factor = 1.0
        self.paths = [ForwardPath(stage.module, self._within_stage) for stage in stages]
        self._built: dict[bool, tuple[list[Spec], Any]] = {}
        """The shapes of the last batch, and torch's schedule for them: for training, and for evaluation."""

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the user's model. Only the signature of `function`, its original forward, is used."""
        self.uninitialized.check(self.peers)  # not all ranks: other stages may have no empty tensors
        self.additions.refuse()
        self.runtime.diverge_generators()
        batch = _read(function, args, kwargs)
        if casts(self.runtime.precision):
            batch = _Batch(*cast_inputs(self.runtime.precision, (batch.args, batch.kwargs, batch.target)))
        trains = torch.is_grad_enabled()
        if trains:
            _refuse_untrainable(batch)
        for stage in self.stages:
            stage.copy_mode()
        schedule, is_new = self._schedule_for(batch, trains=trains)
        with self.unsynced(), self.runtime.new_tensors:  # the schedule's backward is not the user's
            output = self._train(schedule, batch, is_new=is_new) if trains else self._evaluate(schedule, batch)
        if self.runtime.precision.output_dtype is None:
            return output
        return replace_tensors(output, partial(cast_output, self.runtime.precision))

    def rehearsal(self) -> NoReturn:
        raise ValueError(NOT_ALONE.format(why="a stage of a pipeline computes on what other ranks send"))

    def watch(self) -> Finish | None:
        return self.averaging.average if self.synced else None

    def parameters_held(self) -> Iterable[Tensor]:
        return self.averaging.parameters

    def release(self) -> None:
        for path in self.paths:
            path.release()

    def _within_stage(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of a stage, for one micro-batch. What is sent to other stages is contiguous, as gloo needs it."""
        for tensor in tensors_in(args):
            if tensor.requires_grad:
                tensor.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        with autocast(self.runtime.precision, self.runtime.device):
            return map_only_tensors(Tensor.contiguous, function(*args, **kwargs))

    def _train(self, schedule: Any, batch: _Batch, *, is_new: bool) -> Tensor:
        scaler = self.runtime.loss_scaler
        scale = 1.0 if scaler is None else scaler.scale  # small half-precision gradients must not underflow within
        self.factor = scale / (self.options.num_microbatches if self.options.loss_reduction == "mean" else 1)
        losses: list[Tensor] = []
        with _without_gradients(self.parameters), _unchanged_buffers(self.stages, infers_shapes=is_new):
            self._run(schedule, batch, losses)
            gradients = [parameter.grad for parameter in self.parameters]
        total = torch.stack(losses).detach().sum() / scale if self.holds_last else None
        total = self.line.broadcast_object(total, self.options.degree - 1)
        anchor = torch.zeros((), requires_grad=True)  # a stage may have nothing to train
        loss: Tensor = _AttachGradients.apply(total, scale, gradients, anchor, *self.parameters)  # type: ignore[no-untyped-call]
        return loss

    def _evaluate(self, schedule: Any, batch: _Batch) -> Any:
        result = self._run(schedule, batch)
        if batch.target is not None and self.holds_last:
            result = self._loss(result, batch.target)
        return self.line.broadcast_object(result, self.options.degree - 1)

    def _run(self, schedule: Any, batch: _Batch, losses: list[Tensor] | None = None) -> Any:
        last = {"target": batch.target, "losses": losses} if self.holds_last and losses is not None else {}
        outputs = schedule.step(*(batch.args if self.holds_first else ()), **last, **batch.kwargs)
        for part in self.sharded:  # so that loaded weights are copied into shards
            part.reshard()
        return outputs

    def _schedule_for(self, batch: _Batch, *, trains: bool) -> tuple[Any, bool]:
        """A schedule receives into buffers of fixed shapes. The schedule of the last call, or a new one if shapes have
        changed.

        Also returns whether it is new: its first step infers the shapes.
        """
        tensors = batch.tensors()
        specs = [Spec.of(tensor) for tensor in tensors]
        is_new = trains not in self._built or self._built[trains][0] != specs
        self._agree(tensors, trains=trains, with_content=is_new)
        if is_new:
            self._built.pop(trains, None)  # frees its buffers before new ones are allocated
            count = _num_microbatches(tensors, self.options.num_microbatches, divides=trains)
            self._built[trains] = specs, self._build(count, trains=trains)
        return self._built[trains][1], is_new

    def _agree(self, tensors: Sequence[Tensor], *, trains: bool, with_content: bool) -> None:
        """Raise CollectiveError if ranks call the model differently: gloo aborts the process on unexpected shapes."""
        lines = [f"model(...) in a pipeline, {'with' if trains else 'without'} gradients"]
        for place, tensor in enumerate(tensors):
            content = f", content {digest_of_all([tensor])}" if with_content else ""
            lines.append(f"tensor {place} of the batch: {Spec.of(tensor)}{content}")
        check_call(self.line, "\n".join(lines))

    def _build(self, count: int, *, trains: bool) -> Any:
        assert self.runtime.mesh is not None
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        is_one, group = self.options.schedule in OF_ONE_STAGE, self.runtime.mesh.get_group("pipeline")
        name = self.options.schedule if trains else ("GPipe" if is_one else "LoopedBFS")
        stages = [
            PipelineStage(stage.module, stage.index, self.options.num_stages, self.runtime.device, group=group)
            for stage in self.stages
        ]
        return get_schedule_class(name)(
            stages[0] if is_one else stages,
            n_microbatches=count,
            loss_fn=self._scaled_loss if trains else None,
            scale_grads=False,
        )

    def _loss(self, outputs: Any, target: Tensor) -> Tensor:
        with autocast(self.runtime.precision, self.runtime.device):
            return self.options.loss_fn(outputs, target)

    def _scaled_loss(self, outputs: Any, target: Tensor) -> Tensor:
        """The contribution of a micro-batch to the loss of the batch, times the loss scale."""
        return self._loss(outputs, target) * self.factor


@final
class _AttachGradients(torch.autograd.Function):
    """The loss, whose backward returns the gradients of the schedule: Note [One autograd node from the loss to the
    weights]."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, scale: float, gradients: list[Tensor | None], anchor: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "A second backward through the loss of a pipeline: the first one has used up its gradients. Add the "
                "losses, and call `fabric.backward` once."
            )
        factor = outer / ctx.scale
        for gradient in gradients:
            if gradient is not None:
                local_part(gradient).mul_(factor)
        return None, None, None, None, *gradients


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Set `.grad` to None within the context, and restore it afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def _unchanged_buffers(stages: Sequence[Stage], *, infers_shapes: bool) -> Iterator[None]:
    """Raise RuntimeError if a buffer changes within the context: by micro-batches, not by the batch.

    `infers_shapes`: torch 2.14 writes the values of all buffers back after it has inferred shapes, so the values are
    compared where they were written to.
    """
    before = [
        (stage.module, name, buffer, buffer._version, digest_of_all([buffer]) if infers_shapes else None)
        for stage in stages
        for name, buffer in stage.module.named_buffers()
    ]
    yield
    for module, name, buffer, version, digest in before:
        is_written = buffer._version != version and (not infers_shapes or digest_of_all([buffer]) != digest)
        if is_written or module.get_buffer(name) is not buffer:
            raise RuntimeError(
                f"The buffer `{name}` changed in forward. Within a pipeline forward runs once for each micro-batch, "
                "and once more to infer shapes, so its value differs from that after one forward of the whole batch. "
                "Use a layer without running statistics, or freeze it with `.eval()`."
            )


def run_whole(options: Pipeline, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `forward` of `PipelineGradientSync` returns, in one process: without stages and micro-batches."""
    batch = _read(function, args, kwargs)
    outputs = function(*batch.args, **batch.kwargs)
    return outputs if batch.target is None else options.loss_fn(outputs, batch.target)


def _read(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Batch:
    """Separate the target from the inputs: by name, or as the last argument if forward has no such parameter."""
    parameters = inspect.signature(function).parameters
    if "target" in parameters:
        place = list(parameters).index("target")
    elif any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        place = len(args)
    else:
        place = len(parameters)  # one more than forward has
    rest = {name: value for name, value in kwargs.items() if name != "target"}
    target = args[place] if place < len(args) else kwargs.get("target")
    return _Batch((*args[:place], *args[place + 1 :]), rest, target)


def _refuse_untrainable(batch: _Batch) -> None:
    if batch.target is None:
        raise RuntimeError(
            "A model in a pipeline was called without a target while gradients are enabled: backward runs within "
            "the call, and starts at the loss. Write `loss = model(inputs, target)` to train, or call it within "
            "`torch.no_grad()` to get its outputs."
        )
    if any(tensor.requires_grad for tensor in batch.tensors()):
        raise RuntimeError(
            "A model in a pipeline was given a tensor that requires gradients, which it would not get. Pass "
            "`tensor.detach()`, or compute it within the first stage."
        )


def _num_microbatches(tensors: Sequence[Tensor], most: int, *, divides: bool) -> int:
    """Number of micro-batches. Raises ValueError if the batch cannot be split into `most` equal ones (`divides`)."""
    sizes = {tensor.shape[:1] for tensor in tensors}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
        raise ValueError(
            f"A pipeline splits every tensor of a batch along its first dim, but they have the shapes {shapes}. Pass "
            "tensors whose first dim is the batch, and make the others buffers of the model."
        )
    [[size]] = sizes
    if divides and size % most:
        raise ValueError(
            f"A batch of {size} samples cannot be split into `num_microbatches={most}` equal parts. Write a batch size "
            f"that {most} divides, with `drop_last=True` in the loader, or another `num_microbatches`."
        )
    return math.gcd(size, most)
