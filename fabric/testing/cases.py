"""The cases of the conformance suite: a loop, and the claim that it tests, for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

from fabric.strategies.capabilities import Capability
from fabric.testing import loops
from fabric.testing.collectives import run_operations
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
    _trained("groups", "two parameter groups, with a learning-rate schedule", groups=True, optimizer="adamw"),
    _trained("accumulate", "gradient accumulation over three micro-batches", "accumulate", accumulate=3),
    Case(
        name="repeated_backward",
        claim="several synchronised backwards before a step, with parameters of down to one element",
        body=loops.repeated_backward,
    ),
    Case(
        name="scalars",
        claim="a 0-dim parameter",
        body=partial(loops.repeated_backward, scalar=True),
        needs=("scalars",),
    ),
    _trained("clip_norm", "gradients clipped by their norm", "clip_norm", clip="norm"),
    _trained("clip_value", "gradients clipped by value", "clip_value", clip="value"),
    _trained(
        "accumulate_and_clip",
        "gradient accumulation over two micro-batches, then clipping by norm",
        "accumulate",
        "clip_norm",
        accumulate=2,
        clip="norm",
        optimizer="adamw",
    ),
    Case(
        name="weights",
        claim="gradient accumulation of losses with `weight=`, then clipping by norm",
        body=loops.weighted,
        needs=("accumulate", "clip_norm"),
    ),
    Case(
        name="not_finite",
        claim="clipping raises if the norm is not finite, unless that is disabled",
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
        claim="`zero_grad` before or after forward, of the model, of the optimizer, or in a loop over parameters",
        body=loops.zero_grad,
    ),
    Case(
        name="discard",
        claim="gradients discarded within an accumulation window",
        body=loops.discard,
        needs=("accumulate",),
    ),
    Case(
        name="evaluate_between",
        claim="an evaluation between backward and step",
        body=loops.evaluate_between,
        needs=("evaluate",),
    ),
    Case(
        name="dropout", claim="dropout and noise differ between shares of the data, after one seed", body=loops.dropout
    ),
    Case(name="closure", claim="steps with a closure", body=loops.closure, needs=("closure",)),
    _trained(
        "tied", "an embedding whose weight is tied to the output layer", "tied", kinds=("tied",), optimizer="adamw"
    ),
    _trained("frozen", "a layer that is not trained", "frozen", kinds=("frozen",), groups=True),
    _trained("buffers", "BatchNorm over each share of the data", "buffers", by_share=True, kinds=("batch_norm",)),
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
    _trained("unused", "a layer that is unused in every second step", "unused", kinds=("spare",)),
    _trained("methods", "a loss computed by another method of the model than forward", "methods", by_method=True),
    _trained("later_optimizers", "an optimizer constructed after setup", "later_optimizers", later=True),
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
        claim="parameters that are in no module, with gradient accumulation and clipping",
        body=loops.bare_parameters,
        needs=("bare_parameters", "accumulate", "clip_norm", "several_optimizers"),
    ),
    _trained("compile", "`torch.compile` after setup", "compile", compile="after", kinds=("rotary",)),
    _trained("compile_before", "`torch.compile` before setup", "compile_before", compile="before", kinds=("rotary",)),
    Case(name="evaluate", claim="evaluation of a model without an optimizer", body=loops.evaluate, needs=("evaluate",)),
    Case(
        name="gather_for_metrics",
        claim="values of each sample and token in an evaluation, once and in order",
        body=loops.gather_values,
        needs=("evaluate", "uneven"),
    ),
    Case(
        name="empty_init",
        claim="a model constructed without values, which then loads a checkpoint",
        body=loops.empty,
        needs=("empty_init", "load"),
    ),
    Case(
        name="load",
        claim="weights from a checkpoint of plain PyTorch",
        body=partial(loops.resume, with_optimizer=False),
        needs=("load",),
    ),
    Case(
        name="optimizer_state",
        claim="weights and moments from a checkpoint of plain PyTorch",
        body=partial(loops.resume, with_optimizer=True),
        needs=("load", "optimizer_state"),
    ),
    Case(
        name="state_dict",
        claim="the unsharded state in memory, on every rank, as in plain PyTorch",
        body=loops.in_memory,
        needs=("save",),
    ),
    Case(name="uneven", claim="a smaller last batch", body=loops.uneven_batches, needs=("uneven",)),
    Case(name="uneven_stream", claim="a stream with more batches on one rank", body=loops.uneven_stream),
    Case(
        name="evaluate_stream",
        claim="an evaluation of a stream with more batches on one rank",
        body=loops.evaluate_stream,
        needs=("evaluate", "uneven"),
    ),
    Case(name="dispatch", claim="batches that one rank reads for all", body=loops.dispatched),
    Case(name="loaders_first", claim="random numbers drawn after loaders were set up", body=loops.loaders_first),
    Case(
        name="gather_gradients",
        claim="a loss over the outputs of all ranks",
        body=loops.contrastive,
        needs=("gather_gradients",),
    ),
    Case(
        name="collective",
        claim="every operation of the strategy's collective",
        body=run_operations,
        needs=("collective",),
    ),
)
