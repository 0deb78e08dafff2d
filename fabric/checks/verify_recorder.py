"""The check that records a run for `fabric verify`, on every rank; rank 0 writes the record.

Gradients are read after each synchronised backward, when they are averaged and unscaled, and not clipped yet; weights
after the step. Both whole, one tensor at a time, under every strategy.

# Note [Loss scales]
Ranks compute the mean of smaller batches, whose gradients are larger: in float16 they may overflow where those of one
process do not, and a right program skips other steps. So all runs start with a small scale, at which both are finite.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.checks.check import Check
from fabric.checks.verify_record import RankFacts, Record, Recording, Sketch, Step, sketch_of
from fabric.launchers.process.stack import FORWARD
from fabric.strategies.checkpoint.state import StateAccess
from fabric.strategies.checkpoint.tensors import gathered
from fabric.strategies.collectives.flight_recorder import FlightRecorder
from fabric.strategies.data.partition import Joined
from fabric.strategies.data.rng import digest, torch_rng
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.strategy import Strategy
from fabric.strategies.tensors.nests import tensors_in
from fabric.strategies.tensors.parameters import parameters_of, uncompiled

SCALE = 2.0**10
"""The largest loss scale at the start."""


@final
class Recorder(Check):
    """Writes the record of one fabric, and ends the program after the last step."""

    def __init__(self, recording: Recording, strategy: str | Strategy) -> None:
        """`strategy`: as asked for, whose name the record has."""
        self.recording = recording
        self.strategy = strategy if isinstance(strategy, str) else type(strategy).__name__

    def connected(self, runtime: Runtime) -> None:
        self.runtime = runtime
        if self.recording.in_place_of is not None:
            runtime.loop_progress.joined = Joined(count=self.recording.in_place_of, permuted=self.recording.permuted)
        self.models: dict[str, Prepared] = {}
        """By the prefix of their parameters' names."""
        self.num_optimizers = 0
        self.initial: dict[str, Sketch] = {}
        self.shapes: dict[str, Sequence[int] | None] = {}
        self.order: dict[str, None] = {}
        self.hooks: list[RemovableHandle] = []
        """Which note the order, until the first backward."""
        self.layers: set[str] = set()
        self.steps: list[Step] = []
        self.now = RankFacts()
        self.gradients: dict[str, dict[str, Sketch]] = {}
        """By the prefix of their model, until its optimizer steps."""
        self.loss = 0.0
        self.num_unweighted = 0
        """Backwards without a weight, before this step."""
        self.drawn = b""
        self.num_gathers = 0
        self.is_done = False

    def before_setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        inner, prefix = uncompiled(module), self._next_prefix()
        for part in inner.modules() if not self.recording.keeps_dropout else ():
            if isinstance(part, _DROPOUT):
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
                part.dropout = 0.0
        noted = inner.named_modules()
        self.hooks += [part.register_forward_pre_hook(partial(self._note, prefix, name)) for name, part in noted]

    def _note(self, prefix: str, name: str, part: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():  # the order of a compiled model is that of the names in the module
            for each in dict(part.named_parameters(recurse=False)):
                self.order.setdefault(prefix + (f"{name}.{each}" if name else each))

    def model_set_up(self, model: Prepared) -> None:
        prefix = self._next_prefix()
        self.models[prefix] = model
        for name, shape in model.state.shapes(uncompiled(model.module)).items():
            self.shapes[prefix + name] = shape
        for scaler in (self.runtime.loss_scaler, model.loss_scale):
            if scaler is not None:  # Note [Loss scales]
                scaler.load_state_dict({"scale": min(scaler.state_dict()["scale"], SCALE), "good_steps": 0})
        self.initial = self._weights()

    def optimizers_set_up(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        self.num_optimizers += len(optimizers)

    def batch_received(self, batch: Any, source: object) -> None:
        tensors = [each for each in tensors_in(batch) if each.dim() > 0]
        now = self.now
        for place, each in enumerate(tensors):
            if not each.is_floating_point() and not each.is_complex() and each.dim() > 1:
                filled = int(((each != -100) & (each != 0)).sum())
                now.counts[str(place)] = now.counts.get(str(place), 0) + filled
        now.num_batches += 1
        now.num_samples += len(tensors[0]) if tensors else 0
        now.shapes = [list(each.shape[1:]) for each in tensors]
        now.data += sum(map(_digest_of_rows, tensors))
        self.drawn = digest(torch_rng().read())
        self.num_gathers = len(self._gathers())

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self.now.draws |= bool(self.drawn) and digest(torch_rng().read()) != self.drawn
        self.now.gathers += self._gathers()[self.num_gathers :]

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self.loss += float(loss.detach().sum())
        if is_synchronised:
            self._read_gradients()

    def gradients_averaged(self, parameters: Iterable[Tensor]) -> None:
        self._read_gradients()

    def _read_gradients(self) -> None:
        """Read all gradients, and note the parameters that are not as the last step has left them. Ranks: all."""
        while self.hooks:
            self.hooks.pop().remove()
        for prefix, model in self.models.items():
            inner = uncompiled(model.module)
            in_training = (part for part in inner.modules() if part.training)
            self.layers |= {type(part).__name__ for part in in_training if isinstance(part, _BATCH_NORM)}
            found = model.state.gradients(inner)
            self.gradients[prefix] = {prefix + name: sketch_of(gradient) for name, gradient in found}
        latest = self.steps[-1].weights if self.steps else self.initial
        for name, sketch in self._weights().items():
            is_trained = any(name in gradients for gradients in self.gradients.values())
            if is_trained and latest.get(name, sketch) != sketch and name not in self.now.changed:
                self.now.changed.append(name)

    def after_step(self, optimizer: Optimizer) -> None:
        if self.is_done:
            return
        held = {id(each) for each in parameters_of(optimizer)}
        gradients: dict[str, Sketch] = {}
        for prefix, model in self.models.items():
            if optimizer in model.optimizers or any(id(each) in held for each in model.module.parameters()):
                gradients |= self.gradients.pop(prefix, {})
        unweighted = self.runtime.loop_progress.num_unweighted
        self.steps.append(
            Step(
                loss=self.loss,
                learning_rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                is_weighted=unweighted == self.num_unweighted,
                was_skipped=bool(optimizer.step_was_skipped),  # type: ignore[attr-defined]
                gradients=gradients,
                weights=self._weights(),
                ranks=[self.now],
            )
        )
        self.num_unweighted = unweighted
        self.loss, self.now = 0.0, RankFacts()
        if len(self.steps) >= self.recording.num_steps * self.num_optimizers:
            self._write("steps")
            raise SystemExit(0)

    def closing(self) -> None:
        if not self.is_done:
            self._write("program")

    def _write(self, ended: str) -> None:
        """Ranks: all."""
        self.is_done = True
        runtime = self.runtime
        of_ranks = runtime.collective.all_gather_object((self.steps, self.initial, self.order, runtime.share.index))
        if not runtime.world.is_global_zero:
            return
        all_steps, initials, orders, shares = zip(*of_ranks, strict=True)
        firsts = [shares.index(share) for share in range(runtime.share.count)]
        automatic = "ddp" if runtime.world.size > 1 else "single_device"
        Record(
            strategy=automatic if self.strategy == "auto" else self.strategy,
            num_ranks=runtime.world.size,
            num_shares=runtime.share.count,
            eps=torch.finfo(runtime.precision.compute_dtype).eps,
            initial=_first_of(initials),
            shapes=self.shapes,
            order=list(dict.fromkeys(name for names in (*orders, *initials) for name in names)),
            layers=sorted(self.layers),
            steps=[self._merged(steps, firsts) for steps in zip(*all_steps, strict=False)],
            ended=ended,
        ).save(Path(self.recording.path))

    def _merged(self, steps: Sequence[Step], firsts: Sequence[int]) -> Step:
        """One step of all ranks. Ranks that hold parts of one model have one loss, and each may lack tensors.

        `firsts`: the first rank of those that read the same samples.
        """
        mean = sum(step.loss for step in steps) / len(steps)
        return replace(
            steps[0],
            loss=mean * self.runtime.share.count if steps[0].is_weighted else mean,
            gradients=_first_of([step.gradients for step in steps]),
            weights=_first_of([step.weights for step in steps]),
            ranks=[steps[first].ranks[0] for first in firsts],
        )

    def _next_prefix(self) -> str:
        return f"{len(self.models)}: " if self.models else ""

    def _weights(self) -> dict[str, Sketch]:
        """The whole parameters and buffers, on the ranks that read them. Ranks: all."""
        return {
            prefix + name: sketch_of(value)
            for prefix, model in self.models.items()
            for name, value in gathered(
                self.runtime.collective, model.state.read_module(uncompiled(model.module))
            ).items()
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        }

    def _gathers(self) -> list[str]:
        """The lines of the program's gathers that the flight recorder has, without those of a wrapper's hooks."""
        if self.runtime.world.size == 1:
            return []
        lines = [call.where for call in FlightRecorder().calls(with_lines=True) if "gather" in call.operation]
        return [line for line in lines if line and not line.startswith(FORWARD)]


def _first_of(mappings: Sequence[Mapping[str, Sketch]]) -> dict[str, Sketch]:
    """One mapping, where several have a name with the value of the first."""
    return {name: sketch for mapping in reversed(mappings) for name, sketch in mapping.items()}


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _digest_of_rows(tensor: Tensor) -> int:
    """A digest of the rows, whatever their order."""
    rows = [row.reshape(-1).contiguous().view(torch.uint8) for row in tensor.detach().cpu()]
    return sum(zlib.crc32(row.numpy()) for row in rows)
