"""Whether ranks agree on facts, in one all-reduce; the facts are gathered only for the error.

Each rank multiplies the digest of a fact by a coefficient of its own; the coefficients of the ranks that should agree
on it add up to zero modulo 2**64, so the sum over all ranks and facts is zero where they agree, whatever groups the
ranks form.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch

from fabric.launchers.watch.table import ranks_in_words
from fabric.strategies.collectives.collective import Collective

Kind: TypeAlias = Literal["modes", "steps", "options", "gradients", "weights", "states"]


class SanitizerError(RuntimeError):
    """A watched step is wrong: ranks differ in something that they should have in common. Raised on every rank."""


@final
@dataclass(frozen=True, slots=True)
class Fact:
    """Something that some ranks should have in common."""

    kind: Kind
    name: str
    """For the error: "`0.weight`"."""
    holders: tuple[int, ...]
    """The ranks that should agree, in ascending order."""


@final
@dataclass(frozen=True, slots=True)
class Value:
    """What this rank has."""

    digest: int
    text: str | None = None
    """The value in words, where it is short."""


Facts: TypeAlias = Mapping[Fact, Value]


def compare(
    collective: Collective, facts: Facts, data: str, drawn: str, when: str, since: str, *, are_gone: bool
) -> tuple[bool, bool] | None:
    """Raise SanitizerError on every rank unless all agree. Ranks: all. Cost: an all-reduce of seven numbers.

    `data` and `drawn`: what should differ where ranks read different samples. Returns whether each is the same on all
    ranks. `are_gone`: whether this rank lacks facts because their objects no longer exist; where a rank does, returns
    None on all, and nothing was compared.
    """
    rank = collective.rank
    everyone = tuple(range(collective.size))
    total = sum(_coefficient(fact.holders, rank) * value.digest for fact, value in facts.items()) % 2**64
    texts = [_coefficient(everyone, rank) * digest_of_text(text) % 2**64 for text in (data, drawn)]
    numbers = [*(half for each in (total, *texts) for half in (each % 2**32, each >> 32)), are_gone]
    sums = collective.all_reduce(torch.tensor(numbers, dtype=torch.float64), "sum").tolist()
    if sums[6]:
        return None
    differing, data_differs, draws_differ = ((int(sums[i]) + (int(sums[i + 1]) << 32)) % 2**64 for i in (0, 2, 4))
    if differing:
        raise SanitizerError(_first_difference(collective, facts, when, since))
    return not data_differs, not draws_differ


def digest_of_text(text: str) -> int:
    """A 64-bit digest."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _coefficient(ranks: tuple[int, ...], rank: int) -> int:
    """The coefficient of a rank: odd, except for the last rank's. The coefficients of all `ranks` add up to zero modulo
    2**64."""
    if rank != ranks[-1]:
        return digest_of_text(str(rank)) | 1
    return -sum(_coefficient(ranks, each) for each in ranks[:-1])


def _first_difference(collective: Collective, facts: Facts, when: str, since: str) -> str:
    of_ranks: list[dict[Fact, Value]] = collective.all_gather_object(dict(facts))
    missing = Value(0, "nothing")
    for fact in dict.fromkeys(fact for of_rank in of_ranks for fact in of_rank):
        found = {rank: of_ranks[rank].get(fact, missing) for rank in fact.holders}
        if len(set(found.values())) > 1:
            usual = Counter(found.values()).most_common(1)[0][0]
            others, those = (
                [r for r, value in found.items() if (value == usual) == is_usual] for is_usual in (False, True)
            )
            values = ""
            if usual.text != (other := found[others[0]].text):
                values = f" ({other or 'a value'} on rank {others[0]}, {usual.text or 'a value'} on rank {those[0]})"
            return (
                f"{when[0].upper()}{when[1:]}, {fact.name} on {ranks_in_words(others)} differs from that on "
                f"{ranks_in_words(those)}{values}. {since} {_ADVICE[fact.kind]}"
            )
    raise AssertionError("nothing differs")


_ADVICE: Mapping[Kind, str] = {
    "modes": "Call `model.train()` and `model.eval()` on all ranks; after an evaluation on one rank, `model.train()`.",
    "steps": "Call `fabric.backward`, and step each optimizer, on all ranks or on none, and decide by values that are "
    "the same on all: `fabric.all_reduce(loss)`.",
    "options": "Step each scheduler on all ranks, with a value that is the same on all: "
    "`scheduler.step(fabric.all_reduce(loss))`. An optimizer that estimates a value from all parameters (Prodigy) "
    "needs `strategy='ddp'` or 'fsdp'.",
    "gradients": "Gradients that `fabric.backward` did not compute, or that some ranks changed, are this rank's own: "
    "average them, `parameter.grad = fabric.all_reduce(gradient)`.",
    "weights": "Ranks train apart if weights are loaded, drawn or changed on some ranks alone, or with gradients that "
    "were not averaged. Load by `fabric.load` on all ranks, and send what one rank draws: `fabric.broadcast(noise)`.",
    "states": "Load the state of an optimizer on all ranks: `fabric.load(path, state)`.",
}
