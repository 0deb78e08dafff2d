"""The cases of the conformance suite: a loop, and the claim that it tests, for each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

from fabric.strategies.capabilities import Capability
from fabric.testing import loops
from fabric.testing.collectives import run_operations
from fabric.testing.drawn import Trial
from fabric.testing.loops import Recipe, train
from fabric.testing.plain import Loop
from fabric.testing.run import Outcome

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


def _case(body: Body, claim: str, *needs: Capability, name: str = "") -> Case:
    return Case(name=name or body.__name__, claim=claim, body=body, needs=needs)


def _trained(name: str, claim: str, *needs: Capability, by_share: bool = False, **recipe: object) -> Case:
    body = partial(train, recipe=Recipe(**recipe))  # type: ignore[arg-type]
    return Case(name=name, claim=claim, body=body, needs=needs, by_share=by_share)


_CASES = (
    _trained("sgd", "ten steps of SGD with momentum", num_steps=10),
    _trained("adamw", "ten steps of AdamW", num_steps=10, optimizer="adamw"),
    _trained("groups", "two parameter groups, with a learning-rate schedule", groups=True, optimizer="adamw"),
    _trained("accumulate", "gradient accumulation over three micro-batches", "accumulate", accumulate=3),
    _case(
        loops.repeated_backward, "several synchronised backwards before a step, with parameters of down to one element"
    ),
    _case(partial(loops.repeated_backward, scalar=True), "a 0-dim parameter", "scalars", name="scalars"),
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
    _case(
        loops.weights,
        "gradient accumulation of losses with `weight=`, then clipping by norm",
        "accumulate",
        "clip_norm",
    ),
    _case(loops.tokens_in_batches, "batches of so many tokens, with `weight=`", "accumulate", name="token_batches"),
    _case(loops.not_finite, "clipping raises if the norm is not finite, unless that is disabled", "clip_norm"),
    _case(loops.guard, "steps whose gradients are not finite are skipped", "clip_norm"),
    _case(
        loops.zero_grad,
        "`zero_grad` before or after forward, of the model, of the optimizer, or in a loop over parameters",
    ),
    _case(loops.discard, "gradients discarded within an accumulation window", "accumulate"),
    _case(loops.evaluate_between, "an evaluation between backward and step", "evaluate"),
    _case(loops.dropout, "dropout and noise differ between shares of the data, after one seed"),
    _case(loops.closure, "steps with a closure", "closure"),
    _trained(
        "tied", "an embedding whose weight is tied to the output layer", "tied", kinds=("tied",), optimizer="adamw"
    ),
    _trained("frozen", "a layer that is not trained", "frozen", kinds=("frozen",), groups=True),
    _trained("buffers", "BatchNorm over each share of the data", "buffers", by_share=True, kinds=("batch_norm",)),
    _case(
        loops.copies,
        "a target network and an average of weights, copied from a prepared model",
        "copies",
        "several_models",
    ),
    _case(loops.moving_average, "a moving average of the weights, evaluated, saved and loaded between steps", "ema"),
    _case(loops.written_weights, "whole weights that are written between steps"),
    _case(loops.rollouts, "generation with whole weights, and whole weights a bucket at a time, between steps", "save"),
    _trained("unused", "a layer that is unused in every second step", "unused", kinds=("spare",)),
    _trained("methods", "a loss computed by another method of the model than forward", "methods", by_method=True),
    _case(loops.policy, "a forward that returns a distribution, for a loss of its attributes"),
    _trained("later_optimizers", "an optimizer constructed after setup", "later_optimizers", later=True),
    _case(loops.several_optimizers, "two optimizers of one model", "several_optimizers", "clip_norm"),
    _case(loops.several_models, "a generator against a critic, two optimizers", "several_models"),
    _case(loops.joint_backward, "one loss through two models", "several_models", "joint_backward"),
    _case(
        partial(loops.joint_backward, one_optimizer=True),
        "one loss through two models, one optimizer",
        "several_models",
        "joint_backward",
        "joint_optimizer",
        "later_optimizers",
        name="joint_optimizer",
    ),
    _case(
        loops.bare_parameters,
        "parameters that are in no module, with gradient accumulation and clipping",
        "bare_parameters",
        "accumulate",
        "clip_norm",
        "several_optimizers",
    ),
    _trained("compile", "`torch.compile` after setup", "compile", compile="after", kinds=("rotary",)),
    _trained("compile_before", "`torch.compile` before setup", "compile_before", compile="before", kinds=("rotary",)),
    _case(loops.evaluate, "evaluation of a model without an optimizer", "evaluate"),
    _case(
        loops.gather_for_metrics,
        "values of each sample and token in an evaluation, once and in order",
        "evaluate",
        "uneven",
    ),
    _case(loops.empty_init, "a model constructed without values, which then loads a checkpoint", "empty_init", "load"),
    _case(
        partial(loops.resume, with_optimizer=False), "weights from a checkpoint of plain PyTorch", "load", name="load"
    ),
    _case(
        partial(loops.resume, with_optimizer=True),
        "weights and moments from a checkpoint of plain PyTorch",
        "load",
        "optimizer_state",
        name="optimizer_state",
    ),
    _case(loops.state_dict, "the unsharded state in memory, on every rank, as in plain PyTorch", "save"),
    _case(loops.uneven, "a smaller last batch", "uneven"),
    _case(loops.uneven_stream, "a stream with more batches on one rank"),
    _case(loops.evaluate_stream, "an evaluation of a stream with more batches on one rank", "evaluate", "uneven"),
    _case(loops.loaders_first, "random numbers drawn after loaders were set up"),
    _case(loops.gather_gradients, "a loss over the outputs of all ranks", "gather_gradients"),
    _case(run_operations, "every operation of the strategy's collective", "collective", name="collective"),
)
