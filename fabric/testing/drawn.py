"""The models and data of the suite, of sizes drawn from a seed.

Sizes are odd, prime, and smaller than the number of ranks on purpose. Values are drawn from separate generators, so
that a model is the same wherever it is constructed, and torch's global generator is not used.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fabric.strategies.capabilities import Capability
from fabric.strategies.precision.precision import Precision

M = TypeVar("M", bound=nn.Module)
OptimizerWord: TypeAlias = Literal["sgd", "adamw"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model and of its data."""

    vocabulary: int
    width: int
    hidden: int
    depth: int
    length: int
    """Tokens in a sample."""
    batch_size: int
    """Samples per step of each share of the data."""

    @classmethod
    def draw(cls, seed: int) -> "Sizes":
        """Draw sizes from the seed."""
        draw = random.Random(seed)
        return cls(
            vocabulary=draw.randint(5, 13),
            width=draw.randint(4, 9),  # a LayerNorm of two numbers has no gradient
            hidden=draw.randint(1, 11),
            depth=draw.randint(1, 3),
            length=draw.randint(3, 6),
            batch_size=draw.randint(2, 4),
        )


class Block(nn.Module):
    """A residual block. Its scale has one row, so that most ranks hold nothing of it if it is sharded."""

    mean: Tensor | None

    def __init__(self, sizes: Sizes, *, batch_norm: bool) -> None:
        super().__init__()
        # eps: if all numbers are nearly equal, dividing by their deviation would amplify rounding errors. A power of
        # two, because backends may store it as float32 (torch_xla 2.9).
        self.norm = nn.BatchNorm1d(sizes.width, eps=2**-3) if batch_norm else nn.LayerNorm(sizes.width, eps=2**-3)
        self.hidden = nn.Linear(sizes.width, sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.width)
        self.scale = nn.Parameter(torch.ones(1))
        self._dims = (1, 2) if batch_norm else (1, 1)
        self.register_buffer("mean", torch.zeros(sizes.width) if batch_norm else None)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, length, width)` -> the same."""
        normed = self.norm(x.transpose(*self._dims)).transpose(*self._dims)
        if self.mean is not None and self.training:  # another tensor, and not in place
            self.mean = (self.mean + x.detach().mean(dim=(0, 1)).to(self.mean.dtype)) / 2
        elif self.mean is not None:
            normed = normed - self.mean
        residual: Tensor = self.scale * self.out(self.hidden(normed).tanh())
        return x + residual

    def reset_parameters(self) -> None:
        """Needed by `init_module(empty_init=True)` in a module with parameters of its own."""
        nn.init.ones_(self.scale)


class Net(nn.Module):
    """Tokens to logits: `embed`, `blocks`, `out`.

    `tied`: `out` has the weight of `embed`. `frozen`: a layer that is not trained. `spare`: a layer that only
    `forward(tokens, spare=True)` uses. `batch_norm`: blocks normalise over the batch, and update statistics both in
    place and by assigning new tensors. `rotary`: positions are in a buffer that backward needs.
    """

    table: Tensor | None

    def __init__(
        self,
        sizes: Sizes,
        *,
        tied: bool = False,
        frozen: bool = False,
        spare: bool = False,
        batch_norm: bool = False,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, batch_norm=batch_norm) for _ in range(sizes.depth))
        self.frozen = nn.Linear(sizes.width, sizes.width).requires_grad_(False) if frozen else None
        self.spare = nn.Linear(sizes.width, sizes.width) if spare else None
        self.out = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        angles = torch.arange(sizes.length * sizes.width).view(sizes.length, sizes.width).sin() if rotary else None
        self.register_buffer("table", angles, persistent=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor, spare: bool = False) -> Tensor:
        """`(batch, length)` -> `(batch, vocabulary)`."""
        x = self.embed(tokens)
        if self.table is not None:
            x = x + x.flip(-1) * self.table
        for block in self.blocks:
            x = block(x)
        x = x.mean(dim=1)
        if self.frozen is not None:
            x = self.frozen(x)
        if self.spare is not None and spare:
            x = x + self.spare(x)
        logits: Tensor = self.out(x)
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch, for loops in which the model computes it."""
        return nn.functional.cross_entropy(self(tokens), targets)


class Layers(nn.Module):
    """Features to features, by two layers: half of a pair of models."""

    def __init__(self, features_in: int, hidden: int, features_out: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features_in, hidden)
        self.out = nn.Linear(hidden, features_out)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, features_in)` -> `(batch, features_out)`."""
        features: Tensor = self.out(self.hidden(x).tanh())
        return features


class Narrow(Layers):
    """Features to one number. Its last parameters are of `(1, features_in)` and `(1,)`, and with `scalar` of `()`."""

    def __init__(self, features_in: int, hidden: int, *, scalar: bool = False) -> None:
        super().__init__(features_in, hidden, features_in)
        self.number = nn.Linear(features_in, 1)
        self.scale = nn.Parameter(torch.ones(())) if scalar else None

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, features_in)` -> `(batch, 1)`."""
        number: Tensor = self.number(super().forward(x))
        return number if self.scale is None else number * self.scale


class Dropping(Narrow):
    """A number between 1 and 2 for all weights, with dropout: 64 times, independently."""

    def __init__(self, features_in: int, hidden: int) -> None:
        super().__init__(features_in, hidden)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, features_in)` -> `(batch, 64)`."""
        dropped: Tensor = self.drop(1 + super().forward(x).sigmoid().expand(-1, 64))
        return dropped


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a case: its random choices, and what it may assume about the ranks."""

    seed: int
    precision: Precision
    num_shares: int
    """Number of shares of the data. Fewer than ranks if several ranks hold parts of one model."""
    step_size: int
    """Samples of a step, over all shares."""
    batch_size: int
    """The batch size of this loop's loaders."""
    least_tail: int
    """The smallest number of samples in a last step that gives every share a sample."""
    compiler: str | None = "eager"
    """The backend of `torch.compile`; None: nothing is compiled."""
    lacks: frozenset[Capability] = frozenset()
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes.draw(self.seed))

    def in_one_process(self, num_shares: int = 1) -> "Trial":
        """The same trial for one process that reads all data, and may split it itself."""
        return replace(self, num_shares=num_shares, batch_size=self.step_size, compiler=None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which losses are computed."""
        return self.precision.param_dtype

    def draw(self, name: str) -> random.Random:
        """Random choices from the seed, different for each name."""
        return random.Random(f"{self.seed} {name}")

    def generator(self, name: str) -> torch.Generator:
        """A generator from the seed, different for each name."""
        return torch.Generator().manual_seed(self.draw(name).getrandbits(32))

    def net(self, name: str = "net", **kinds: bool) -> Net:
        """A net of these kinds (see `Net`), different for each name."""
        return self.filled(Net(self.sizes, **kinds), name)

    def layers(self, features_in: int, features_out: int, name: str) -> Layers:
        """Half of a pair of models."""
        return self.filled(Layers(features_in, self.sizes.hidden, features_out), name)

    def narrow(self, *, scalar: bool = False) -> Narrow:
        """A model with parameters down to one element (see `Narrow`)."""
        return self.filled(Narrow(self.sizes.width, self.sizes.hidden, scalar=scalar), "narrow")

    def dropping(self) -> Dropping:
        """A model with dropout (see `Dropping`)."""
        return self.filled(Dropping(self.sizes.width, self.sizes.hidden), "dropping")

    @torch.no_grad()
    def filled(self, module: M, name: str) -> M:
        """Draw the values of every parameter, with scales near one."""
        generator = self.generator(name)
        for parameter_name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                center = 1.0 if parameter_name.endswith(("norm.weight", "scale")) else 0.0
                parameter.normal_(center, 0.1, generator=generator)
        return module

    def optimizer(self, module: nn.Module, word: OptimizerWord = "sgd") -> Optimizer:
        """An optimizer of all parameters."""
        return make_optimizer([{"params": list(module.parameters())}], word)

    def loader(self, num_steps: int = 4, tail: int = 0) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled `(tokens, targets, index)`, for `num_steps` steps of all shares and `tail` samples more."""
        total = num_steps * self.step_size + tail
        generator = self.generator("data")
        tokens = torch.randint(self.sizes.vocabulary, (total, self.sizes.length), generator=generator)
        targets = torch.randint(self.sizes.vocabulary, (total,), generator=generator)
        dataset = TensorDataset(tokens, targets, torch.arange(total))
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True, generator=self.generator("order"))

    def probe(self) -> Tensor:
        """Tokens that every rank evaluates a model on at the end."""
        return torch.randint(self.sizes.vocabulary, (5, self.sizes.length), generator=self.generator("probe"))


def make_optimizer(groups: list[dict[str, Any]], word: OptimizerWord) -> Optimizer:
    """SGD with momentum, or AdamW."""
    if word == "sgd":
        # At 0.1 one seed in 60 diverges, and makes 3e-4 of a difference of 1e-7 within ten steps.
        return SGD(groups, lr=0.02, momentum=0.9)
    # eps above rounding errors: Adam divides by gradients, so a difference of 1e-8 in a tiny one could be a full step
    return AdamW(groups, lr=0.01, eps=1e-3)
