"""Why a run may differ from one process: the causes that are present in this program, each with what to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fabric.checks.record import RankFacts, Record, Step, factor_of
from fabric.strategies.tensors.parameters import name_some
from fabric.verify.comparison import Difference


def causes(reference: Record, run: Record, difference: Difference) -> list[str]:
    """Sentences, the likeliest first. Empty: nothing in the records explains the difference."""
    return list(dict.fromkeys(_causes(reference, run, difference)))


def causes_of_chaos(reference: Record, permuted: Record) -> list[str]:
    """Why two runs of one process, which differ in the order of samples alone, part in the first step."""
    found = []
    if reference.steps and permuted.steps:
        one, two = reference.steps[0], permuted.steps[0]
        if _reads_other_samples(one, two):
            found.append(_OTHER_SAMPLES)
        if any(rank.draws for rank in one.ranks):
            found.append(_DRAWS)
    return found


def factor_in_words(reference: Record, run: Record, difference: Difference) -> str:
    """A factor between the two, named where it is the number of ranks, or a ratio of what ranks counted."""
    if difference.reference is None or difference.run is None:
        return ""
    factor = factor_of(difference.reference, difference.run)
    if factor is None or abs(factor - 1) < 5e-3:
        return ""
    ranks = run.num_shares
    for number, words in (
        (ranks, f"{ranks}, the number of ranks"),
        (1 / ranks, f"1/{ranks}, one over the number of ranks"),
    ):
        if abs(factor / number - 1) < 5e-3:
            return f", {words}, times that of the reference"
    return f", {factor:.4g} times that of the reference"


def _causes(reference: Record, run: Record, difference: Difference) -> Iterator[str]:
    if difference.step == 0:
        yield _SEED
        return
    number = difference.step - 1
    step, other = reference.steps[number], run.steps[number]
    if step.learning_rates != other.learning_rates and difference.kind == "weight":
        yield _LEARNING_RATE.format(one=_rates(step), other=_rates(other))
    if other.was_skipped and not step.was_skipped:
        yield _SKIPPED
    if changed := sorted({name for rank in (*step.ranks, *other.ranks) for name in rank.changed}):
        yield _OUTSIDE.format(names=name_some(changed))
    if _reads_other_samples(step, other):
        yield _OTHER_SAMPLES if any(rank.num_batches for rank in step.ranks) else _NO_LOADER
    yield from _of_gradients(reference, run, step, other, difference)
    if not any(rank.num_batches for rank in other.ranks):
        yield _NO_LOADER


def _of_gradients(reference: Record, run: Record, step: Step, other: Step, difference: Difference) -> Iterator[str]:
    if reference.layers or run.layers:
        yield _BATCH_NORM.format(layers=", ".join(run.layers or reference.layers))
    if not other.is_weighted:
        for counted in _counts(other.ranks):
            if len(set(counted)) > 1:
                yield _UNEQUAL.format(counts=", ".join(map(str, counted)))
                break
    if lines := sorted({line for rank in other.ranks for line in rank.gathers if line}):
        yield _GATHERED.format(lines=", ".join(lines))
    if any(rank.draws for rank in (*step.ranks, *other.ranks)):
        yield _DRAWS
    ranks = run.num_shares
    if difference.reference is not None and difference.run is not None:
        factor = factor_of(difference.reference, difference.run)
        if factor is not None and any(abs(factor / each - 1) < 5e-3 for each in (ranks, 1 / ranks)):
            yield _FACTOR.format(ranks=ranks)


def _counts(ranks: Sequence[RankFacts]) -> Iterator[list[int]]:
    """What each rank has in a step: samples, and tokens by their place in the batch."""
    yield [rank.num_samples for rank in ranks]
    for place in dict.fromkeys(place for rank in ranks for place in rank.counts):
        yield [rank.counts.get(place, 0) for rank in ranks]


def _reads_other_samples(step: Step, other: Step) -> bool:
    """Whether the samples differ, where that can be known: padding to another length changes a sample's tensors."""
    ours, theirs = [rank for rank in step.ranks if rank.num_batches], [rank for rank in other.ranks if rank.num_batches]
    if bool(ours) != bool(theirs):
        return True
    shapes = {tuple(map(tuple, rank.shapes)) for rank in (*ours, *theirs)}
    if len(shapes) != 1:
        return sum(rank.num_samples for rank in ours) != sum(rank.num_samples for rank in theirs)
    return sum(rank.data for rank in ours) % 2**62 != sum(rank.data for rank in theirs) % 2**62


def _rates(step: Step) -> str:
    return ", ".join(f"{rate:g}" for rate in step.learning_rates)


_SEED = (
    "The models differ before the first step. Seed the program before it makes the model: "
    "`fabric.seed_everything(0)` or `torch.manual_seed(0)`."
)
_LEARNING_RATE = (
    "The learning rate is {other}, and {one} in one process: a schedule or a factor depends on `fabric.world_size`, on "
    "`len(loader)` before `setup_dataloaders`, or on a number of this rank."
)
_SKIPPED = (
    "The loss scaler skipped this step: gradients overflowed in float16. Compare in `--precision bf16-mixed` or "
    "`32-true`."
)
_OTHER_SAMPLES = (
    "The ranks read other samples than one process: random augmentation draws other numbers on each rank, or an order "
    "is drawn from a generator that the loop uses. Compare without augmentation, and pass the `DataLoader` a "
    "`generator`."
)
_NO_LOADER = (
    "The loop reads data that no prepared loader gives it: each rank draws or reads its own. Pass the loader to "
    "`fabric.setup_dataloaders`."
)
_BATCH_NORM = (
    "{layers} normalises by the statistics of each rank's batch. Write "
    "`nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `fabric.setup` (on GPUs), or a norm of single samples."
)
_UNEQUAL = (
    "The ranks have {counts} samples or tokens in this step, and `fabric.backward(loss)` averages the means of the "
    "ranks, which counts those of smaller batches more. Write `fabric.backward(loss_sum, weight=num_tokens)`."
)
_GATHERED = (
    "The loss uses what was gathered at {lines}, through which no gradient flows to other ranks. Write "
    "`fabric.all_gather(x, sync_grads=True)`."
)
_DRAWS = (
    "Random numbers are drawn in forward (dropout as a function, noise): ranks draw other numbers than one process. "
    "Layers of dropout are switched off here; switch this off, too."
)
_OUTSIDE = (
    "{names} changed outside of an optimizer's step: each rank changes its own copy, or its shard. Change weights by "
    "values that are the same on all ranks."
)
_FACTOR = (
    "The gradient is off by the number of ranks ({ranks}): a loss divided or multiplied by `fabric.world_size`, or a "
    "gradient that is summed over the ranks once more after `fabric.backward`, which averages it."
)
