"""Compares the record of a run with that of its reference, within the rounding of this model.

# Note [Rounding is measured]
The reference is run twice, the second time with the samples of each batch permuted. In exact arithmetic both are equal;
the distance between them, per tensor and step, is the rounding of this model, in its precision, as it grows with the
steps. A run is equal to the reference if no tensor is farther from it than `MARGIN` times that. A tensor whose two
references happen to be closer than others may be as far as a few units of the last place of its norm.

A gradient that is zero but for rounding, as that of the bias of an attention's keys, is compared; the weight is not:
Adam divides the gradient by its own size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

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

_ABSENT: Sketch = (0.0,) * (LENGTH + 1)
"""A gradient that a run does not have is as good as zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first tensor in which a run differs from its reference."""

    step: int
    """From 1; 0: before the first step."""
    kind: str
    """What `Record.tensors` calls it."""
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
    eps, largest, second = max(reference.eps, run.eps), 0.0, permuted or reference
    rounded = set[str]()  # names of parameters whose gradient has been rounding alone
    places = {name: place for place, name in enumerate(dict.fromkeys((*reference.order, *run.order)))}
    for number in range(-1, min(len(each.steps) for each in (reference, second, run))):
        skips = [each for each in (reference, run) if number >= 0 and each.steps[number].was_skipped]
        if len(skips) == 2:
            continue  # both overflowed in float16, and changed no weight
        if skips and eps == FLOAT16:
            return Comparison(num_compared=number, largest=largest, skipped_by=skips[0].strategy)
        moments = [*zip(*(each.tensors(number) for each in (reference, second, run)), strict=True)]
        spread = _spread(moments[0][0][1], moments[0][1][1])
        if not spread <= (5e-3 if eps < 1e-4 else 2e-2):  # more than rounding, or not finite
            return Comparison(num_compared=number, largest=largest)
        relative = MARGIN * spread + min(UNITS * eps, 0.02)
        if permuted is None:
            relative = max(UNMEASURED, 8 * eps) if tolerance is None else tolerance
        for (kind, one), (_, two), (_, other) in moments:
            total = math.sqrt(sum(sketch[0] ** 2 for sketch in one.values()))
            for name in sorted({*one, *other}, key=lambda name: (places.get(name, len(places)), name)):
                ours, theirs = one.get(name, _ABSENT), other.get(name, _ABSENT)
                away, norm = distance(ours, theirs), max(ours[0], 1e-2 * total)
                if kind == "gradient" and 0 < max(ours[0], theirs[0]) <= relative * norm:
                    rounded.add(name)
                if kind == "weight" and name in rounded:
                    continue
                if not away <= max(MARGIN * distance(ours, two.get(name, ours)), relative * norm):
                    found = Difference(step=number + 1, kind=kind, name=name, reference=ours, run=theirs)
                    return Comparison(num_compared=number + 1, difference=found, largest=found.relative)
                largest = max(largest, away / norm if norm else 0.0)
    return Comparison(num_compared=number + 1, largest=largest)


def why_nothing(record: Record) -> str | None:
    """Why a run that is equal to its reference shows nothing; None if it shows something."""
    norms, losses = [step.gradient_norm for step in record.steps], {step.loss for step in record.steps}
    last = {name: sketch for step in record.steps for name, sketch in step.weights.items()}
    reasons = {
        "the program took no step of a prepared optimizer (does it resume a run that has ended?)": not norms,
        "no `fabric.backward` ran before any step": not any(step.gradients for step in record.steps),
        "all gradients are zero": not any(norms),
        "no gradient is finite": not any(map(math.isfinite, norms)),
        "the loss scaler skipped all steps": all(step.was_skipped for step in record.steps),
        "no weight has changed": all(record.initial.get(name) == sketch for name, sketch in last.items()),
        f"the loss is {max(losses, default=0):g} in all {len(norms)} steps": len(losses) == 1 < len(norms),
    }
    return next((words for words, is_so in reasons.items() if is_so), None)


def _spread(one: Mapping[str, Sketch], two: Mapping[str, Sketch]) -> float:
    """The relative distance of the tensors of two references, all together; NaN if they are not finite."""
    square = sum(sketch[0] ** 2 for sketch in one.values())
    away = sum(distance(sketch, two.get(name, _ABSENT)) ** 2 for name, sketch in one.items())
    return math.sqrt(away / square) if square else 0.0
