"""Why a run may differ from one process: the causes that are present in this program, each with what to write."""

from collections.abc import Iterator, Sequence
from itertools import permutations

from fabric.checks.verify_record import RankFacts, Record, Step, factor_of
from fabric.strategies.tensors.parameters import name_some
from fabric.verify.comparison import Difference


def causes_of_chaos(one: Step, two: Step) -> list[str]:
    """Why two runs of one process, which differ in the order of samples alone, part in this step."""
    found = [_OTHER_SAMPLES] if _reads_other_samples(one, two) else []
    found += [_DRAWS] if any(rank.draws for rank in one.ranks) else []
    return found or [_CHAOS]


def ratio_in_words(run: Record, difference: Difference) -> str:
    """What the tensor of the run is: a multiple of that of the reference, named where it is the number of ranks or a
    ratio of what they count; empty: no multiple."""
    factor = factor_of(difference.reference, difference.run)
    if factor is None or _is_near(factor, 1):
        return ""
    named = {run.num_shares: "number of ranks with data of their own", run.num_ranks: "number of ranks"}
    for number, words in named.items():
        if _is_near(factor, number):
            return f"{number} times (the {words})"
        if _is_near(factor, 1 / number):
            return f"1/{number} times (one over the {words})"
    for counts in _counts(run.steps[max(difference.step, 1) - 1].ranks):
        for one, other in permutations((*counts, sum(counts)), 2):
            if other and _is_near(factor, one / other):
                return f"{one}/{other} times (a ratio of the samples or tokens that the ranks have in this step)"
    return f"{factor:.4g} times"


def _is_near(factor: float, number: float) -> bool:
    return abs(factor / number - 1) < 5e-3 if number else False


def causes(reference: Record, run: Record, difference: Difference) -> Iterator[str]:
    """Sentences, the likeliest first. Empty: nothing in the records explains the difference."""
    if difference.step == 0:
        yield _SEED
        return
    step, other = reference.steps[difference.step - 1], run.steps[difference.step - 1]
    if step.learning_rates != other.learning_rates and difference.kind == "weight":
        one, two = (", ".join(f"{rate:g}" for rate in each.learning_rates) for each in (step, other))
        yield _LEARNING_RATE.format(one=one, other=two)
    ratio = ratio_in_words(run, difference)
    is_factor = difference.kind == "gradient" and "(" in ratio  # of the right gradient: nothing else differs
    changed = sorted({name for rank in (*step.ranks, *other.ranks) for name in rank.changed})
    if changed and not is_factor:
        yield _OUTSIDE.format(names=name_some(changed))
    reads_loader = any(rank.num_batches for rank in step.ranks)
    if reads_loader and not is_factor and _reads_other_samples(step, other):
        yield _OTHER_SAMPLES
    if not (reads_loader or is_factor):
        yield _NO_LOADER
    if (reference.layers or run.layers) and run.num_shares > 1 and not is_factor:
        yield _BATCH_NORM.format(layers=", ".join(run.layers or reference.layers))
    unequal = [counts for counts in _counts(other.ranks) if len(set(counts)) > 1]
    if unequal and not other.is_weighted:
        yield _UNEQUAL.format(counts=", ".join(map(str, unequal[0])))
    if lines := sorted({line for rank in other.ranks for line in rank.gathers}):
        yield _GATHERED.format(lines=", ".join(lines))
    if not is_factor and any(rank.draws for rank in (*step.ranks, *other.ranks)):
        yield _DRAWS
    if "the number of ranks" in ratio:
        yield _FACTOR.format(ranks=run.num_ranks, how=_DIVIDED if ratio.startswith("1/") else _MULTIPLIED)
    if run.eps > 1e-4 and not is_factor:
        yield _HALF


def _counts(ranks: Sequence[RankFacts]) -> Iterator[list[int]]:
    """What each rank has in a step: samples, and tokens by their place in the batch."""
    yield [rank.num_samples for rank in ranks]
    for place in dict.fromkeys(place for rank in ranks for place in rank.counts):
        yield [rank.counts.get(place, 0) for rank in ranks]


def _reads_other_samples(step: Step, other: Step) -> bool:
    """Whether the samples differ, where that can be known: padding to another length changes a sample's tensors."""
    ranks = (*step.ranks, *other.ranks)
    is_padded = len({tuple(map(tuple, rank.shapes)) for rank in ranks}) > 1
    ours, theirs = (sum(rank.num_samples if is_padded else rank.data for rank in each.ranks) for each in (step, other))
    return ours != theirs


_SEED = "Seed the program before it makes the model: `fabric.seed_everything(0)` or `torch.manual_seed(0)`."
_LEARNING_RATE = (
    "The learning rate is {other}, and {one} in one process: a schedule or a factor depends on `fabric.world_size`, on "
    "`len(loader)` before `setup_dataloaders`, or on a number of this rank."
)
SKIPPED = "The loss scaler skipped a step in one of the runs. Compare in `--precision bf16-mixed` or `32-true`."
_OTHER_SAMPLES = (
    "The ranks read other samples than one process: random augmentation draws other numbers on each rank, or an order "
    "is drawn from a generator that the loop uses, or that `setup_dataloaders` read before the model was made. Compare "
    "without augmentation, and pass the `DataLoader` a `generator`."
)
RESUMED = (
    "The program resumes from a file that the run before it has written by itself. Save by `fabric.save`, which writes "
    "elsewhere under `fabric verify`, or make resuming an option, and leave it out."
)
_NO_LOADER = "The loop reads data that no prepared loader gives it. Pass the loader to `fabric.setup_dataloaders`."
_BATCH_NORM = (
    "{layers} normalises by the statistics of each rank's batch. Write "
    "`nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `fabric.setup` (on GPUs), or a norm of single samples."
)
_UNEQUAL = (
    "The ranks have {counts} samples or tokens in this step, and `fabric.backward(loss)` averages the means of the "
    "ranks, which counts those of smaller batches more. Write `fabric.backward(loss_sum, weight=num_tokens)`."
)
_GATHERED = "The loss uses what was gathered at {lines}. Write `fabric.all_gather(x, sync_grads=True)` for gradients."
_DRAWS = "Random numbers are drawn in forward (dropout, noise), others on each rank. Switch this off."
_OUTSIDE = (
    "{names} changed outside of an optimizer's step: each rank changes its own copy, or its shard. Change weights by "
    "values that are the same on all ranks."
)
_FACTOR = "The gradient is off by the number of ranks ({ranks}): {how}."
_DIVIDED = (
    "a loss that is divided by `fabric.world_size`, or a loss that is a sum over samples (write "
    "`fabric.backward(loss_sum, weight=num_samples)`)"
)
_MULTIPLIED = (
    "a loss that is multiplied by `fabric.world_size`, or a gradient that is summed over the ranks once more after "
    "`fabric.backward`, which averages it"
)
_HALF = "In half precision right programs may part in the first steps, too: compare in `--precision 32-true` first."
_CHAOS = "The model amplifies rounding. Compare in a higher precision, such as `--precision 64-true`."
