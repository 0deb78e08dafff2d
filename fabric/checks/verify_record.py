"""The record of a run for `fabric verify`, and the check that writes it.

Per step: the loss, the norm of the gradient, the learning rate, and of each tensor a norm and a sketch: a few numbers
per tensor, whatever its size. Written as JSON, so that reading a record runs no code. The check runs on every rank;
rank 0 writes. Gradients are read after each synchronised backward, when they are averaged and unscaled, and not clipped
yet; weights after the step. Both whole, one tensor at a time, under every strategy.

# Note [Sketches]
A sketch of a tensor is a few sums of its elements with random signs, the same signs in every record. It is linear, so
the difference of two sketches is the sketch of the difference, whose norm estimates that of the difference within about
a half, without the tensors. Source: the count sketch, Charikar, Chen, Farach-Colton, "Finding frequent items in data
streams", ICALP 2002.

# Note [Loss scales]
Ranks compute the mean of smaller batches, whose gradients are larger: in float16 they may overflow where those of one
process do not, and a right program skips other steps. So all runs start with a small scale, at which both are finite.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.checks.check import Check
from fabric.checks.training_state import BATCH_NORM, DROPOUT
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

LENGTH = 8
"""Numbers in a sketch."""
FORMAT = 1
_CHUNK = 2**18

Sketch: TypeAlias = Sequence[float]
"""The norm of a tensor, and the sums of its elements with random signs."""


@torch.no_grad()
def sketch_of(tensor: Tensor) -> Sketch:
    """See Note [Sketches]. In float64; waits for the tensor's device."""
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    sums, square = torch.zeros(LENGTH, dtype=torch.float64), 0.0
    for number, part in enumerate(torch.split(tensor.detach().reshape(-1), _CHUNK)):
        values = part.to("cpu", torch.float64)
        square += float(values.square().sum())
        signed = values * _signs(number % 16)[: values.numel()]
        sums += torch.nn.functional.pad(signed, (0, -values.numel() % LENGTH)).view(-1, LENGTH).sum(0)
    return [math.sqrt(square), *sums.tolist()]


@lru_cache(maxsize=16)
def _signs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.float64) * 2 - 1


def distance(one: Sketch, other: Sketch) -> float:
    """An estimate of the norm of the difference; NaN if one of the tensors is not finite."""
    return math.dist(one[1:], other[1:])


def factor_of(reference: Sketch, other: Sketch) -> float | None:
    """The number by which the reference would have to be multiplied to be the other; None: it is no multiple of it."""
    square = _product(reference, reference)
    if square == 0 or not all(map(math.isfinite, (*reference, *other))):
        return None
    factor = _product(reference, other) / square
    rest = math.sqrt(sum((b - factor * a) ** 2 for a, b in zip(reference[1:], other[1:], strict=True)))
    return factor if rest < 1e-2 * abs(factor) * math.sqrt(square) else None


def _product(one: Sketch, other: Sketch) -> float:
    return sum(a * b for a, b in zip(one[1:], other[1:], strict=True))


@dataclass(slots=True, kw_only=True)
class RankFacts:
    """What one rank sees in one step, while it sees it."""

    num_samples: int = 0
    """Of the batches of prepared loaders."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of integer tensors in the batches: how many elements are neither -100 nor 0, by the place in the batch."""
    shapes: Sequence[Sequence[int]] = ()
    """The shapes of the batches' tensors, without the first dimension."""
    data: int = 0
    """A digest of the samples, whatever their order."""
    draws: bool = False
    """Whether random numbers were drawn between the last batch and the backward."""
    num_batches: int = 0
    changed: list[str] = field(default_factory=list)
    """Parameters that have changed since the last step, before this one."""
    gathers: list[str] = field(default_factory=list)
    """The lines at which the program gathered tensors between the last batch and the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one optimizer."""

    loss: float
    """The mean over the ranks, or with `weight=` the sum, added up over the backward passes of the step."""
    learning_rates: Sequence[float]
    is_weighted: bool
    was_skipped: bool
    gradients: Mapping[str, Sketch]
    """Averaged and unscaled, before they are clipped."""
    weights: Mapping[str, Sketch]
    """After the step."""
    ranks: Sequence[RankFacts] = ()
    """One of the ranks that read the same samples."""

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients together."""
        return math.sqrt(sum(sketch[0] ** 2 for sketch in self.gradients.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one run has recorded."""

    strategy: str
    num_ranks: int
    num_shares: int
    """Into how many parts the data was split."""
    eps: float
    """The rounding of the dtype in which parameters are computed."""
    initial: Mapping[str, Sketch]
    """The weights before the first step."""
    shapes: Mapping[str, Sequence[int] | None]
    """Of the whole weights; None for other entries of a state dict."""
    order: Sequence[str]
    """The names of parameters, in the order in which forward uses them."""
    layers: Sequence[str]
    """Kinds of layers in training mode that depend on the batch: BatchNorm."""
    steps: Sequence[Step]
    ended: str
    """Why the record ends: "steps", or "program" if the program ended before."""

    @property
    def samples_of_first_step(self) -> int:
        """The samples of all ranks."""
        return sum(rank.num_samples for rank in self.steps[0].ranks) if self.steps else 0

    def tensors(self, number: int) -> list[tuple[str, Mapping[str, Sketch]]]:
        """The tensors of a step from 0, in the order in which they are compared; -1: before the first step."""
        if number < 0:
            return [("initial weight", self.initial)]
        return [("gradient", self.steps[number].gradients), ("weight", self.steps[number].weights)]

    def save(self, path: Path) -> None:
        """Write the record, complete or not at all."""
        part = path.with_name(path.name + ".part")
        part.write_bytes(gzip.compress(json.dumps({"format": FORMAT, **asdict(self)}).encode()))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a record. Raises: ValueError: it is damaged, or no record of this version."""
        try:
            content = json.loads(gzip.decompress(path.read_bytes()))
            if content.pop("format") != FORMAT:
                raise ValueError("another version of torchfabric has written it")
            steps = [
                Step(**{**step, "ranks": [RankFacts(**facts) for facts in step["ranks"]]})
                for step in content.pop("steps")
            ]
            return cls(**content, steps=steps)
        except (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"`{path}` is no complete record of `fabric verify --save`: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The record that one run writes. Passed to the program with the options of `fabric run`."""

    path: str
    """The file that rank 0 writes."""
    num_steps: int
    """After so many steps of each optimizer the program ends."""
    in_place_of: int | None = None
    """For the reference: one process, which reads the batches of so many ranks as one; None: the run as asked."""
    permuted: bool = False
    """Whether the samples of each batch are permuted: what changes then is rounding."""
    keeps_dropout: bool = False


SCALE = 2.0**10
"""The largest loss scale at the start."""


@final
class Recorder(Check):
    """Writes the record of one fabric, and ends the program after the last step. Checkpoints stay as they are."""

    def __init__(self, recording: Recording, strategy: str | Strategy) -> None:
        """`strategy`: as asked for, whose name the record has."""
        self.recording = recording
        self.checkpoint_folder = f"{recording.path}.checkpoints"
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
        """By the prefix of their model, as the last backward left them."""
        self.loss = 0.0
        """Of the backwards before this step; of those before the last one, if none has followed it."""
        self.num_unweighted = 0
        """Backwards without a weight, before those of this step."""
        self.begins_step = False
        """Whether the next backward is the first one since a step."""
        self.drawn = b""
        self.num_gathers = 0
        self.is_done = False

    def before_setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        inner, prefix = uncompiled(module), self._next_prefix()
        for part in inner.modules() if not self.recording.keeps_dropout else ():
            if isinstance(part, DROPOUT):
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
        if self.begins_step:
            self.loss, self.num_unweighted, self.begins_step = 0.0, self.runtime.loop_progress.num_unweighted, False
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
            self.layers |= {type(part).__name__ for part in in_training if isinstance(part, BATCH_NORM)}
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
                gradients |= self.gradients.get(prefix, {})
        self.steps.append(
            Step(
                loss=self.loss,
                learning_rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                is_weighted=self.runtime.loop_progress.num_unweighted == self.num_unweighted,
                was_skipped=bool(optimizer.step_was_skipped),  # type: ignore[attr-defined]
                gradients=gradients,
                weights=self._weights(),
                ranks=[self.now],
            )
        )
        self.now, self.begins_step = RankFacts(), True
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


def _digest_of_rows(tensor: Tensor) -> int:
    """A digest of the rows, whatever their order."""
    rows = [row.reshape(-1).contiguous().view(torch.uint8) for row in tensor.detach().cpu()]
    return sum(zlib.crc32(row.numpy()) for row in rows)
