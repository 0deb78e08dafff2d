"""Whether ranks that should hold the same weights and optimizer states do, bit for bit: `Fabric(check_replicas=N)`.

A checkpoint knows of each tensor which part a rank holds, and which ranks hold the same. Each rank multiplies the
digest of such a part by a coefficient of its own; the coefficients of the ranks that hold it add up to zero, so the sum
over all ranks is zero where the parts are equal, whatever groups the ranks form. One all-reduce of two numbers for each
check; the ranks gather digests only for the error.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from fabric.strategies.checkpoint.state import PlainState, ReplicatedState, StateAccess
from fabric.strategies.checkpoint.tensor_shards import TensorShards, replicated
from fabric.strategies.collectives.collective import Collective
from fabric.strategies.digest import numbers_of
from fabric.strategies.gradients.clipping import parameters_of
from fabric.strategies.prepared import Prepared

_Digests = dict[tuple[str, tuple[int, ...]], int]
"""Of each part, by its name and the ranks that hold it."""


class ReplicasDifferError(RuntimeError):
    """Ranks that should hold the same weights or optimizer states do not. Raised on every rank."""


@final
class ReplicaCheck:
    """Compares replicas after the first step of each optimizer, after every `every` of its steps, and at the end."""

    def __init__(self, collective: Collective, every: int) -> None:
        self._collective, self._every = collective, every
        self._models: list[Prepared] = []
        self._access: dict[Optimizer, StateAccess] = {}
        self._num_steps: Counter[Optimizer] = Counter()
        self._equal_at: Counter[Optimizer] = Counter()
        """The step after which the replicas were last compared."""

    def add(self, model: Prepared) -> None:
        """Compare this model from here on. Raises: ValueError: which ranks hold the same parts of it is not known."""
        if self._collective.size > 1 and not _tells_holders(model.state):
            raise ValueError(_UNKNOWN.format(every=self._every, name=type(model.module).__name__))
        self._models.append(model)

    def attach(self, optimizer: Optimizer, access: StateAccess) -> Callable[[], None]:
        """Compare after steps of this optimizer. Returns what undoes it."""
        if self._collective.size == 1:
            return lambda: None

        def after_step(*_: Any) -> None:
            self._num_steps[optimizer] += 1
            number = self._num_steps[optimizer]
            if number == 1 or number % self._every == 0:
                self._compare(optimizer)

        self._access[optimizer] = access
        return optimizer.register_step_post_hook(after_step).remove

    def finish(self) -> None:
        """Compare once more what was stepped since it was compared last. Ranks: all."""
        for optimizer, number in self._num_steps.items():
            if number > self._equal_at[optimizer]:
                self._compare(optimizer)

    def _compare(self, optimizer: Optimizer) -> None:
        """Raises: ReplicasDifferError, on every rank. Ranks: all."""
        models = [model for model in self._models if model.holds(optimizer)]
        digests = self._digests(models, optimizer)
        rank = self._collective.rank
        total = sum(_coefficient(ranks, rank) * digest for (_, ranks), digest in digests.items()) % 2**64
        low, high = self._collective.add_numbers(total % 2**32, total >> 32)
        if (int(low) + (int(high) << 32)) % 2**64:
            self._refuse(optimizer, digests)
        self._equal_at[optimizer] = self._num_steps[optimizer]

    def _digests(self, models: Iterable[Prepared], optimizer: Optimizer) -> _Digests:
        parts: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for name, held in self._held(models, optimizer):
            if len(held.holders) > 1:
                parts.update(
                    {
                        (f"{name}{chunk.offsets if i else ''}", held.holders): part
                        for i, (chunk, part) in enumerate(held.shards)
                    }
                )
        return dict(zip(parts, numbers_of(parts.values()), strict=True))

    def _held(self, models: Iterable[Prepared], optimizer: Optimizer) -> Iterator[tuple[str, TensorShards]]:
        """What this rank holds of the parameters and of the optimizer's states, by names for people."""
        everyone = range(self._collective.size)
        names: dict[int, str] = {}
        for model in models:
            label = f"{type(model.module).__name__}: " if len(self._models) > 1 else ""
            state = _local(model.state, self._collective.size).read_module_shards(model.module)
            for name, parameter in model.module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), name)
                value = state.get(name)
                if isinstance(value, Tensor):  # not sharded
                    value = replicated(value, everyone)
                if isinstance(value, TensorShards):
                    yield f"{label}`{name}`", value
        parameters = parameters_of(optimizer)
        states = (
            _local(self._access[optimizer], self._collective.size).read_optimizer_shards(optimizer).get("state", {})
        )
        for index, entries in states.items():
            known = names.get(id(parameters[index])) if index < len(parameters) else None
            of = f"`{known}`" if known else f"parameter {index}"
            for name, value in entries.items():
                if isinstance(value, TensorShards):
                    yield f"`{name}` of {of} in `{type(optimizer).__name__}`", value

    def _refuse(self, optimizer: Optimizer, digests: _Digests) -> None:
        of_ranks = self._collective.all_gather_object(digests)
        name, found = next(
            (name, [(rank, of_ranks[rank].get((name, holders))) for rank in holders])
            for of_rank in of_ranks
            for name, holders in of_rank
            if len({of_ranks[rank].get((name, holders)) for rank in holders}) > 1
        )
        usual = Counter(digest for _, digest in found).most_common(1)[0][0]
        number, before = self._num_steps[optimizer], self._equal_at[optimizer]
        raise ReplicasDifferError(
            _DIFFER.format(
                name=name,
                others=_ranks([rank for rank, digest in found if digest != usual]),
                usual=_ranks([rank for rank, digest in found if digest == usual]),
                step=f"step {number} of `{type(optimizer).__name__}`",
                since=f"They were equal after step {before}." if before else "It is the first time they are compared.",
            )
        )


def _coefficient(ranks: tuple[int, ...], rank: int) -> int:
    """Odd but for the last rank's, and zero modulo 2**64 over all of `ranks`."""
    if rank != ranks[-1]:
        digest = hashlib.blake2b(str(rank).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") | 1
    return -sum(_coefficient(ranks, each) for each in ranks[:-1])


def _local(access: StateAccess, size: int) -> StateAccess:
    return ReplicatedState(size) if isinstance(access, PlainState) else access


def _tells_holders(access: StateAccess) -> bool:
    return isinstance(access, PlainState) or type(access).read_module_shards is not StateAccess.read_module_shards


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


_DIFFER = (
    "`Fabric(check_replicas=...)`: after {step}, {name} on {others} differs from that on {usual}. {since} Replicas "
    "drift apart if weights, gradients or an optimizer's state are changed on some ranks alone, if a rank steps with "
    "gradients that were not averaged, or if ranks take different branches."
)
_UNKNOWN = (
    "`Fabric(check_replicas={every})`: with this strategy it is not known which ranks hold the same parts of "
    "`{name}`, so they cannot be compared. Leave `check_replicas` out."
)
