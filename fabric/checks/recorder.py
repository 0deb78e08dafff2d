"""The check that records a run for `fabric verify`, on every rank; rank 0 writes the record.

Gradients are read after each synchronised backward, when they are averaged and unscaled, and not clipped yet; weights
after the step. Both whole, one tensor at a time, under every strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.checks.check import Check
from fabric.checks.record import RankFacts, Record, Recording, Sketch, Step, sketch_of
from fabric.strategies.checkpoint.state import StateAccess, uncompiled
from fabric.strategies.collectives.flight_recorder import FlightRecorder
from fabric.strategies.data.rng import digest, torch_rng
from fabric.strategies.data.share import Joined
from fabric.strategies.prepared import Prepared
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.nests import tensors_in
from fabric.strategies.tensors.parameters import parameters_of


@final
class Recorder(Check):
    """Writes the record of one fabric, and ends the program after the last step."""

    def __init__(self, recording: Recording, strategy: str) -> None:
        """`strategy`: its name, for the record."""
        self.recording, self.strategy = recording, strategy

    def connected(self, runtime: Runtime) -> None:
        self.runtime = runtime
        if self.recording.in_place_of is not None:
            joined = Joined(count=self.recording.in_place_of, permuted=self.recording.permuted)
            runtime.loader_numbers.joined = joined
        self.models: list[Prepared] = []
        self.optimizers: list[Optimizer] = []
        self.initial: dict[str, Sketch] = {}
        self.latest: dict[str, Sketch] = {}
        """The weights after the last step of their optimizer."""
        self.order: list[str] = []
        self.layers: set[str] = set()
        self.steps: list[Step] = []
        self.facts: list[RankFacts] = []
        """Of this rank, one for each step."""
        self.now = RankFacts()
        self.gradients: dict[str, Sketch] = {}
        self.loss = 0.0
        self.num_unweighted = 0
        self.is_weighted = False
        self.drawn = b""
        self.num_calls = 0
        self.is_done = False

    def before_setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        inner = uncompiled(module)
        for part in inner.modules():
            if isinstance(part, _DROPOUT) and not self.recording.keeps_dropout:
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention) and not self.recording.keeps_dropout:
                part.dropout = 0.0
        names = {part: name for name, part in inner.named_modules()}
        used: dict[nn.Module, None] = {}
        handles = [part.register_forward_pre_hook(lambda part, _: used.setdefault(part)) for part in names]

        def note(*_: Any) -> None:
            for handle in (*handles, end):
                handle.remove()
            prefix = self._prefix(len(self.models) - 1)
            named = [f"{names[part]}.{name}".lstrip(".") for part in used for name in part._parameters]
            self.order += [prefix + name for name in named]
            modes = {type(part).__name__ for part in used if isinstance(part, _BATCH_NORM) and part.training}
            self.layers |= modes

        end = inner.register_forward_hook(note)

    def model_set_up(self, model: Prepared) -> None:
        self.models.append(model)
        self.initial |= self._weights(len(self.models) - 1)

    def optimizers_set_up(self, optimizers: Mapping[Optimizer, StateAccess]) -> None:
        self.optimizers += optimizers

    def batch_received(self, batch: Any, source: object) -> None:
        tensors = [each for each in tensors_in(batch) if each.dim() > 0]
        counts = dict(self.now.counts)
        for place, each in enumerate(tensors):
            if not each.is_floating_point() and not each.is_complex() and each.dim() > 1:
                counts[str(place)] = counts.get(str(place), 0) + int(((each != -100) & (each != 0)).sum())
        self.now = replace(
            self.now,
            num_batches=self.now.num_batches + 1,
            num_samples=self.now.num_samples + (len(tensors[0]) if tensors else 0),
            counts=counts,
            shapes=[list(each.shape[1:]) for each in tensors],
            data=(self.now.data + sum(map(_digest_of_rows, tensors))) % 2**62,
        )
        self.drawn = digest(torch_rng().read())
        self.num_calls = self._calls_of_user()[0]

    def before_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self.num_unweighted = self.runtime.loader_numbers.num_unweighted
        number, gathers = self._calls_of_user()
        self.now = replace(
            self.now,
            draws=self.now.draws or (bool(self.drawn) and digest(torch_rng().read()) != self.drawn),
            gathers=[*self.now.gathers, *gathers[self.num_calls - number or len(gathers) :]],
        )

    def after_backward(self, loss: Tensor, is_synchronised: bool) -> None:
        self.is_weighted = self.runtime.loader_numbers.num_unweighted == self.num_unweighted
        self.loss += float(loss.detach().sum())
        if is_synchronised:
            for number, model in enumerate(self.models):
                prefix = self._prefix(number)
                for name, gradient in model.state.gradients(uncompiled(model.module)):
                    self.gradients[prefix + name] = sketch_of(gradient)
                self._note_changes(self._weights(number))

    def after_step(self, optimizer: Optimizer) -> None:
        if self.is_done:
            return
        held = {id(each) for each in parameters_of(optimizer)}
        weights: dict[str, Sketch] = {}
        for number, model in enumerate(self.models):
            if optimizer in model.optimizers or any(id(each) in held for each in model.module.parameters()):
                weights |= self._weights(number)
        self.steps.append(
            Step(
                optimizer=type(optimizer).__name__,
                loss=self.loss,
                learning_rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                is_weighted=self.is_weighted,
                was_skipped=bool(optimizer.step_was_skipped),  # type: ignore[attr-defined]
                gradients=self.gradients,
                weights=weights,
            )
        )
        self.latest |= weights
        self.facts.append(self.now)
        self.gradients, self.loss, self.now = {}, 0.0, RankFacts()
        if len(self.steps) >= self.recording.num_steps * len(self.optimizers):
            self._write("steps")
            raise SystemExit(0)

    def _note_changes(self, weights: Mapping[str, Sketch]) -> None:
        """Note parameters that are not as the last step has left them."""
        names = [
            name for name in weights if name in self.gradients and self.latest.get(name, weights[name]) != weights[name]
        ]
        self.now = replace(self.now, changed=[*dict.fromkeys((*self.now.changed, *names))])

    def closing(self) -> None:
        if not self.is_done:
            self._write("program")

    def _write(self, ended: str) -> None:
        """Ranks: all."""
        self.is_done = True
        runtime = self.runtime
        of_ranks = runtime.collective.all_gather_object((self.steps, self.facts, self.initial, self.order))
        if not runtime.world.is_global_zero:
            return
        initial = {name: sketch for _, _, each, _ in reversed(of_ranks) for name, sketch in each.items()}
        steps = []
        for number, step in enumerate(self.steps):
            mine = [steps[number] for steps, _, _, _ in of_ranks if number < len(steps)]
            share = runtime.share.count / runtime.world.size  # ranks that hold parts of one model have one loss
            loss = sum(each.loss for each in mine) * (share if step.is_weighted else 1 / len(mine))
            steps.append(
                replace(
                    step,
                    loss=loss,
                    gradients={name: value for each in reversed(mine) for name, value in each.gradients.items()},
                    weights={name: value for each in reversed(mine) for name, value in each.weights.items()},
                    ranks=[facts[number] for _, facts, _, _ in of_ranks if number < len(facts)],
                )
            )
        precision = runtime.precision
        Record(
            strategy=self._strategy,
            num_ranks=runtime.world.size,
            num_shares=runtime.share.count,
            precision=precision.name,
            eps=torch.finfo(precision.compute_dtype).eps,
            initial=initial,
            order=list(dict.fromkeys(name for _, _, _, order in of_ranks for name in order)),
            layers=sorted(self.layers),
            steps=steps,
            ended=ended,
        ).save(Path(self.recording.path))

    @property
    def _strategy(self) -> str:
        automatic = "ddp" if self.runtime.world.size > 1 else "single_device"
        return automatic if self.strategy == "auto" else self.strategy

    def _prefix(self, number: int) -> str:
        return f"{number}: " if number else ""

    def _weights(self, number: int) -> dict[str, Sketch]:
        """The whole parameters and buffers of a model, on the ranks that read them. Ranks: all."""
        model, prefix = self.models[number], self._prefix(number)
        state = model.state.read_module(uncompiled(model.module))
        return {
            prefix + name: sketch_of(value)
            for name, value in state.items()
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        }

    def _calls_of_user(self) -> tuple[int, list[str]]:
        """How many gathers the flight recorder has, and their lines."""
        if self.runtime.world.size == 1:
            return 0, []
        calls = [call for call in FlightRecorder().calls(with_lines=True) if "gather" in call.operation]
        return len(calls), [call.where or "" for call in calls]


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _digest_of_rows(tensor: Tensor) -> int:
    """A digest of the rows, whatever their order."""
    if tensor.is_floating_point():
        values = tensor.detach().to("cpu", torch.float64).view(torch.int64)
    elif tensor.is_complex():
        return _digest_of_rows(torch.view_as_real(tensor))
    else:
        values = tensor.detach().to("cpu", torch.int64)
    rows = values.reshape(len(values), -1)
    places = torch.arange(1, rows.shape[1] + 1) * -0x61C8864680B583EB
    sums = (rows * (places | 1)).sum(1)
    return int(((sums ^ (sums >> 29)) * 0x5851F42D4C957F2D).sum()) % 2**62
