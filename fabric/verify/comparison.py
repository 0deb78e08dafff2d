"""Compares the record of a run with that of its reference, within the rounding of this model.

# Note [Rounding is measured]
The reference is run twice, the second time with the samples of each batch permuted. In exact arithmetic both are equal;
the distance between them, per tensor and step, is the rounding of this model, in its precision, as it grows with the
steps. A run is equal to the reference if no tensor is farther from it than `MARGIN` times that. A tensor whose two
references happen to be closer than others may be as far as a few units of the last place of its norm.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fabric.checks.verify_record import LENGTH, Record, Sketch, distance

MARGIN = 16.0
"""How many times the distance of the references a run may be away: sketches estimate norms within about a half, and
two draws of rounding errors differ by as much again."""
UNITS = 64.0
"""Units of the last place by which a tensor may differ, relative to its norm; in half precision, 0.02 of the norm."""
UNMEASURED = 1e-3
"""The relative tolerance without a second reference; in half precision, eight units of the last place."""
FLOAT16 = 2.0**-10
"""The rounding of the dtype in which gradients overflow."""

Kind: TypeAlias = Literal["initial weight", "gradient", "weight"]
Sketches: TypeAlias = Mapping[str, Sketch]
_ABSENT: Sketch = (0.0,) * (LENGTH + 1)
"""A gradient that a run does not have is as good as zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first tensor in which a run differs from its reference."""

    step: int
    """From 1; 0: before the first step."""
    kind: Kind
    name: str
    reference: Sketch
    run: Sketch

    @property
    def relative(self) -> float:
        """The distance over the norm of the reference."""
        return distance(self.reference, self.run) / (self.reference[0] or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found."""

    num_compared: int
    """Steps in which the run was compared: all of both, or those before a difference, or before the references part."""
    largest: float
    """The greatest relative difference of a tensor in the steps that were compared."""
    difference: Difference | None = None
    skipped_by: str = ""
    """The strategy under which alone the next step overflowed in float16: nothing is compared from there on."""


def compare(reference: Record, permuted: Record | None, run: Record, tolerance: float | None) -> Comparison:
    """Compare step by step, gradients before weights, parameters in the order of forward.

    `permuted`: the second reference; None, where there is none: `tolerance` decides, or `UNMEASURED`.
    """
    eps = max(reference.eps, run.eps)
    is_measured = permuted is not None and tolerance is None
    places = {name: place for place, name in enumerate(dict.fromkeys((*reference.order, *run.order)))}
    largest = 0.0
    for number in range(-1, min(len(reference.steps), len(run.steps))):
        skips = [each for each in (reference, run) if number >= 0 and each.steps[number].was_skipped]
        if len(skips) == 2:
            continue  # both overflowed in float16, and changed no weight
        if skips and eps == FLOAT16:
            return Comparison(num_compared=number, largest=largest, skipped_by=skips[0].strategy)
        spread = _spread(reference, permuted, number) if permuted is not None and is_measured else 0.0
        if not spread <= (5e-3 if eps < 1e-4 else 2e-2):  # more than rounding, or not finite
            return Comparison(num_compared=number, largest=largest)
        if is_measured:
            relative = MARGIN * spread + min(UNITS * eps, 0.02)
        else:
            relative = max(UNMEASURED, 8 * eps) if tolerance is None else tolerance
        for kind, one, two, other in _tensors(reference, permuted, run, number):
            total = math.sqrt(sum(sketch[0] ** 2 for sketch in one.values()))
            for name in sorted({*one, *other}, key=lambda name: (places.get(name, len(places)), name)):
                ours, theirs = one.get(name, _ABSENT), other.get(name, _ABSENT)
                away, norm = distance(ours, theirs), max(ours[0], 1e-2 * total)
                measured = MARGIN * distance(ours, two.get(name, ours)) if is_measured else 0.0
                is_finite = math.isfinite(ours[0]) or math.isfinite(theirs[0])  # else both steps have overflowed
                if is_finite and not away <= max(measured, relative * norm):
                    found = Difference(step=number + 1, kind=kind, name=name, reference=ours, run=theirs)
                    return Comparison(num_compared=number + 1, difference=found, largest=found.relative)
                largest = max(largest, away / norm if norm else 0.0)
    return Comparison(num_compared=number + 1, largest=largest)


def why_nothing(record: Record) -> str | None:
    """Why a run that is equal to its reference shows nothing; None if it shows something."""
    if not record.steps:
        return "the program took no step of a prepared optimizer"
    if all(step.gradient_norm == 0 for step in record.steps):
        return "all gradients are zero"
    if not any(math.isfinite(step.gradient_norm) for step in record.steps):
        return "no gradient is finite"
    if all(step.was_skipped for step in record.steps):
        return "the loss scaler skipped all steps"
    last = {name: sketch for step in record.steps for name, sketch in step.weights.items()}
    if all(record.initial.get(name) == sketch for name, sketch in last.items()):
        return "no weight has changed"
    losses = {step.loss for step in record.steps}
    if len(record.steps) > 1 and len(losses) == 1:
        return f"the loss is {losses.pop():g} in all {len(record.steps)} steps"
    return None


def _spread(reference: Record, permuted: Record, number: int) -> float:
    """The relative distance of the gradients of two references, all together; infinite where one has ended."""
    if not 0 <= number < len(permuted.steps):
        return math.inf if number >= 0 else 0.0
    one, two = reference.steps[number].gradients, permuted.steps[number].gradients
    square = sum(sketch[0] ** 2 for sketch in one.values())
    away = sum(distance(sketch, two.get(name, _ABSENT)) ** 2 for name, sketch in one.items())
    return math.sqrt(away / square) if square else 0.0


def _tensors(
    reference: Record, permuted: Record | None, run: Record, number: int
) -> Iterator[tuple[Kind, Sketches, Sketches, Sketches]]:
    if number < 0:
        yield "initial weight", reference.initial, {}, run.initial
        return
    one, other = reference.steps[number], run.steps[number]
    two = one if permuted is None else permuted.steps[number]
    yield "gradient", one.gradients, two.gradients, other.gradients
    yield "weight", one.weights, two.weights, other.weights
