"""The cases of the conformance suite: a loop, and the claim that it tests, for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

from fabric.strategies.capabilities import Capability
from fabric.testing import loops
from fabric.testing.collectives import talk
from fabric.testing.drawn import Trial
from fabric.testing.loops import Outcome, Recipe, train
from fabric.testing.plain import Loop

Body: TypeAlias = Callable[[Loop, Trial], Outcome]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loop that returns the same under a strategy as in one process of plain PyTorch."""

    name: str
    claim: str
    body: Body
    needs: tuple[Capability, ...] = ()
    """The capabilities that the loop needs. If the strategy lacks one of them, the loop raises that message."""
    by_share: bool = False
    """In plain PyTorch, too, each share of the data is computed by a replica, and gradients are averaged."""

    def __str__(self) -> str:
        return self.name


def cases() -> tuple[Case, ...]:
    """All cases, the simplest first."""
    return _CASES


def _trained(name: str, claim: str, *needs: Capability, by_share: bool = False, **recipe: object) -> Case:
    body = partial(train, recipe=Recipe(**recipe))  # type: ignore[arg-type]
    return Case(name=name, claim=claim, body=body, needs=needs, by_share=by_share)


_CASES = (
    _trained("sgd", "ten steps of SGD with momentum", num_steps=10),
    _trained("adamw", "ten steps of AdamW", num_steps=10, optimizer="adamw"),
    _trained("groups", "two groups of parameters, a schedule of learning rates", groups=True, optimizer="adamw"),
    _trained("accumulate", "windows of three micro-batches", "accumulate", accumulate=3),
    Case(
        name="repeated_backward",
        claim="several synchronised backwards before a step, parameters down to one element",
        body=loops.repeated_backward,
    ),
    Case(
        name="scalars",
        claim="a parameter without dimensions",
        body=partial(loops.repeated_backward, scalar=True),
        needs=("scalars",),
    ),
    _trained("clip_norm", "gradients clipped by their norm", "clip_norm", clip="norm"),
    _trained("clip_value", "gradients clipped by value", "clip_value", clip="value"),
    _trained(
        "accumulate_and_clip",
        "windows of two micro-batches, then clipped by norm",
        "accumulate",
        "clip_norm",
        accumulate=2,
        clip="norm",
        optimizer="adamw",
    ),
    Case(
        name="weights",
        claim="windows of micro-batches whose losses have weights, clipped by norm",
        body=loops.weighted,
        needs=("accumulate", "clip_norm"),
    ),
    Case(
        name="not_finite",
        claim="a norm that is not finite raises where that is asked for",
        body=loops.not_finite,
        needs=("clip_norm",),
    ),
    Case(
        name="guard",
        claim="steps whose gradients are not finite are skipped",
        body=loops.guarded,
        needs=("clip_norm",),
    ),
    Case(
        name="zero_grad",
        claim="gradients cleared before or after forward, by the model, the optimizer or a loop over parameters",
        body=loops.zero_grad,
    ),
    Case(
        name="discard",
        claim="a window of micro-batches whose gradients are cleared before its end",
        body=loops.discard,
        needs=("accumulate",),
    ),
    Case(
        name="evaluate_between",
        claim="an evaluation between backward and step",
        body=loops.evaluate_between,
        needs=("evaluate",),
    ),
    Case(name="dropout", claim="dropout and noise on each share of the data, after one seed", body=loops.dropout),
    Case(name="closure", claim="steps with a closure", body=loops.closure, needs=("closure",)),
    _trained("tied", "an embedding tied to the output", "tied", kinds=("tied",), optimizer="adamw"),
    _trained("frozen", "a layer that is not trained", "frozen", kinds=("frozen",), groups=True),
    _trained("buffers", "BatchNorm over each share", "buffers", by_share=True, kinds=("batch_norm",)),
    Case(
        name="copies",
        claim="a target network and an average of weights, copied from a prepared model",
        body=loops.copies,
        needs=("copies", "several_models"),
    ),
    Case(
        name="moving_average",
        claim="a moving average of the weights, evaluated, saved and loaded between steps",
        body=loops.moving_average,
        needs=("ema",),
    ),
    _trained("unused", "a layer that takes no part in every second step", "unused", kinds=("spare",)),
    _trained("methods", "a loss from a method of the model", "methods", by_method=True),
    _trained("later_optimizers", "an optimizer made after setup", "later_optimizers", later=True),
    Case(
        name="several_optimizers",
        claim="two optimizers of one model",
        body=loops.two_optimizers,
        needs=("several_optimizers",),
    ),
    Case(
        name="several_models",
        claim="a generator against a critic, two optimizers",
        body=loops.generator_and_critic,
        needs=("several_models",),
    ),
    Case(
        name="joint_backward",
        claim="one loss through two models",
        body=loops.encoder_and_head,
        needs=("several_models", "joint_backward"),
    ),
    Case(
        name="joint_optimizer",
        claim="one loss through two models, one optimizer",
        body=partial(loops.encoder_and_head, one_optimizer=True),
        needs=("several_models", "joint_backward", "joint_optimizer", "later_optimizers"),
    ),
    Case(
        name="bare_parameters",
        claim="a temperature and a scale that are in no module, clipped and accumulated",
        body=loops.temperature,
        needs=("bare_parameters", "accumulate", "clip_norm", "several_optimizers"),
    ),
    _trained("compile", "compiled after setup", "compile", compile="after", kinds=("rotary",)),
    _trained("compile_before", "compiled before setup", "compile_before", compile="before", kinds=("rotary",)),
    Case(name="evaluate", claim="a model without optimizer", body=loops.evaluate, needs=("evaluate",)),
    Case(
        name="gather_for_metrics",
        claim="values of each sample and token of an evaluation, once and in order",
        body=loops.gathered,
        needs=("evaluate", "uneven"),
    ),
    Case(name="empty_init", claim="a model made without values", body=loops.empty, needs=("empty_init", "load")),
    Case(
        name="load",
        claim="weights from a checkpoint of plain PyTorch",
        body=partial(loops.go_on, with_optimizer=False),
        needs=("load",),
    ),
    Case(
        name="optimizer_state",
        claim="weights and moments from a checkpoint of plain PyTorch",
        body=partial(loops.go_on, with_optimizer=True),
        needs=("load", "optimizer_state"),
    ),
    Case(
        name="state_dict",
        claim="the whole state in memory, on every rank, as plain PyTorch has it",
        body=loops.in_memory,
        needs=("save",),
    ),
    Case(name="uneven", claim="a last batch that is smaller", body=loops.tail, needs=("uneven",)),
    Case(name="uneven_stream", claim="a stream with more batches on one rank", body=loops.uneven_stream),
    Case(name="loaders_first", claim="numbers drawn after loaders were set up", body=loops.loaders_first),
    Case(
        name="gather_gradients",
        claim="a loss over the outputs of all ranks",
        body=loops.contrast,
        needs=("gather_gradients",),
    ),
    Case(name="collective", claim="every operation of the strategy's collective", body=talk, needs=("talk",)),
)
