"""The record of a run: per step the loss, the norm of the gradient, the learning rate, and of each tensor a norm and a
sketch. A few numbers per tensor, whatever its size; written as JSON, so that reading a record runs no code.

# Note [Sketches]
A sketch of a tensor is a few sums of its elements with random signs, the same signs in every record. It is linear, so
the difference of two sketches is the sketch of the difference, whose norm estimates that of the difference within about
a half, without the tensors. Source: the count sketch, Charikar, Chen, Farach-Colton, "Finding frequent items in data
streams", ICALP 2002.
"""

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

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
