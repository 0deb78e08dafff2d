"""Compares the record of a run with that of its reference, within the rounding of this model.

# Note [Rounding is measured]
The reference is run twice, the second time with the samples of each batch permuted. In exact arithmetic both are equal;
the distance between them, per tensor and step, is the rounding of this model, in its precision, as it grows with the
steps. A run is equal to the reference if no tensor is farther from it than `MARGIN` times that. A tensor whose two
references happen to be closer than others may be as far as a few units of the last place of its norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fabric.checks.record import Record, Sketch, Step, distance

MARGIN = 16.0
"""How many times the distance of the references a run may be away: sketches estimate norms within about a half, and
two draws of rounding errors differ by as much again."""
UNITS = 64.0
"""Units of the last place by which a tensor may differ, relative to its norm."""
LARGEST_SPREAD = 0.05
"""The relative distance of two references from which on steps are not compared: the model amplifies rounding."""

Kind: TypeAlias = Literal["initial weight", "gradient", "weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first tensor in which a run differs from its reference."""

    step: int
    """From 1; 0: before the first step."""
    kind: Kind
    name: str
    reference: Sketch | None
    """None: the reference has no such tensor."""
    run: Sketch | None

    @property
    def relative(self) -> float:
        """The distance over the norm of the reference."""
        if self.reference is None or self.run is None:
            return math.inf
        return distance(self.reference, self.run) / (self.reference[0] or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found."""

    num_compared: int
    """Steps in which the run was compared."""
    difference: Difference | None
    parted_at: int | None
    """The step at which the two references part, so that it and later ones were not compared."""
    largest: float
    """The greatest relative difference of a tensor in the steps that were compared."""


def compare(reference: Record, permuted: Record | None, run: Record, tolerance: float | None) -> Comparison:
    """Compare step by step, gradients before weights, parameters in the order of forward.

    `permuted`: the second reference; None, where there is none: `tolerance` decides, or 1e-3.
    """
    steps = min(len(reference.steps), len(run.steps))
    spreads = [] if permuted is None else [*map(_spread, reference.steps, permuted.steps)]
    eps = max(reference.eps, run.eps)
    order = dict.fromkeys((*reference.order, *run.order))
    places, largest = {name: place for place, name in enumerate(order)}, 0.0
    for number in range(-1, steps):
        is_measured = permuted is not None and tolerance is None and number >= 0
        if is_measured and not (number < len(spreads) and spreads[number] <= LARGEST_SPREAD):
            return Comparison(num_compared=number, difference=None, parted_at=number + 1, largest=largest)
        for kind, one, two, other in _tensors(reference, permuted, run, number):
            total = math.sqrt(sum(sketch[0] ** 2 for sketch in one.values()))
            for name in sorted({*one, *other}, key=lambda name: (places.get(name, len(places)), name)):
                if name not in one or name not in other:
                    found = Difference(
                        step=number + 1, kind=kind, name=name, reference=one.get(name), run=other.get(name)
                    )
                    if (found.reference or found.run or (0.0,))[0] == 0:
                        continue  # a gradient of zeros, and none
                    return Comparison(num_compared=number + 1, difference=found, parted_at=None, largest=math.inf)
                away, norm = distance(one[name], other[name]), one[name][0]
                if tolerance is not None or permuted is None:
                    allowed = (1e-3 if tolerance is None else tolerance) * max(norm, 1e-2 * total)
                else:
                    spread = distance(one[name], two[name]) if name in two else 0.0
                    typical = spreads[number] * norm if number >= 0 else 0.0
                    allowed = MARGIN * max(spread, typical) + UNITS * eps * max(norm, 1e-2 * total)
                if not away <= allowed and not _is_both_nan(one[name], other[name]):
                    found = Difference(step=number + 1, kind=kind, name=name, reference=one[name], run=other[name])
                    return Comparison(num_compared=number + 1, difference=found, parted_at=None, largest=found.relative)
                largest = max(largest, away / norm if norm > 1e-2 * total else 0.0)
    return Comparison(num_compared=steps, difference=None, parted_at=None, largest=largest)


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


def _spread(one: Step, two: Step) -> float:
    """The relative distance of the gradients of two references, all together."""
    square = sum(sketch[0] ** 2 for sketch in one.gradients.values())
    away = sum(distance(s, two.gradients[name]) ** 2 for name, s in one.gradients.items() if name in two.gradients)
    return math.sqrt(away / square) if square else 0.0


def _tensors(
    reference: Record, permuted: Record | None, run: Record, number: int
) -> Iterator[tuple[Kind, Mapping[str, Sketch], Mapping[str, Sketch], Mapping[str, Sketch]]]:
    if number < 0:
        yield "initial weight", reference.initial, {}, run.initial
        return
    one, other = reference.steps[number], run.steps[number]
    two = permuted.steps[number] if permuted is not None and number < len(permuted.steps) else one
    yield "gradient", one.gradients, two.gradients, other.gradients
    yield "weight", one.weights, two.weights, other.weights


def _is_both_nan(one: Sketch, other: Sketch) -> bool:
    return math.isnan(one[0]) and math.isnan(other[0])
