"""What the loops of the suite share: a model and its optimizer in training, and the results of a loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fabric.testing.drawn import OptimizerWord, Trial
from fabric.testing.plain import Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a loop, which must be equal."""

    losses: list[float]
    norms: list[float] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of each model for the same input, in evaluation."""
    saved: dict[str, Any] = field(default_factory=dict)
    """The state of models and optimizers, as in a checkpoint."""


class Run:
    """A model and its optimizer, set up, and the losses of the steps so far. `net`: by default the trial's."""

    model: Any
    optimizer: Any

    def __init__(
        self, loop: Loop, trial: Trial, net: nn.Module | None = None, optimizer: OptimizerWord = "sgd"
    ) -> None:
        net = trial.net() if net is None else net
        self._loop, self._trial = loop, trial
        self.model, self.optimizer = loop.setup(net, trial.optimizer(net, optimizer))
        self.losses: list[float] = []

    def batches(self, num_steps: int = 4) -> Any:
        """The batches of an epoch."""
        return self._loop.setup_dataloaders(self._trial.loader(num_steps))

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Forward and loss of a batch."""
        return cross_entropy(self.model(tokens).to(self._trial.dtype), targets, reduction=reduction)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, and note the loss."""
        self._loop.backward(loss, model=self.model)
        self.losses.append(mean(self._loop, loss))

    def update(self) -> None:
        """Step, and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, loss: Tensor) -> None:
        """A step with the gradients of this loss."""
        self.backward(loss)
        self.update()

    def epoch(self, loader: Iterable[Any] | None = None) -> None:
        """Train on all batches."""
        for tokens, targets, _ in self.batches() if loader is None else loader:
            self.step(self.loss(tokens, targets))

    def finished(self, norms: Sequence[float] = (), inputs: Mapping[str, Tensor] | None = None) -> Outcome:
        """The results; see the function below."""
        models, optimizers = {"model": self.model}, {"optimizer": self.optimizer}
        return finished(self._loop, self._trial, models, optimizers, self.losses, norms, inputs)


def finished(
    loop: Loop,
    trial: Trial,
    models: dict[str, Any],
    optimizers: dict[str, Any],
    losses: list[float],
    norms: Sequence[float] = (),
    inputs: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """The results of models and optimizers. Raises AssertionError if outputs differ between ranks.

    `inputs`: the inputs of each model's evaluation, if not tokens.
    """
    outputs: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, model in models.items():
            probe = trial.probe() if inputs is None else inputs[name]
            outputs[name] = model.eval()(loop.to_device(probe)).to(trial.dtype)
            of_ranks = loop.all_gather(outputs[name])
            assert torch.equal(of_ranks, of_ranks[:1].expand_as(of_ranks)), f"ranks differ in {name}: {of_ranks}"
    state = models if "optimizer_state" in trial.lacks else {**models, **optimizers}
    saved: dict[str, Any] = {}
    if "save" not in trial.lacks:
        with folder(loop) as path:
            loop.save(f"{path}/end", state, blocking=trial.draw("blocking").random() < 0.5)
            saved = loop.load(f"{path}/end")
    return Outcome(losses=losses, norms=list(norms), outputs=outputs, saved=saved)


@contextmanager
def folder(loop: Loop) -> Iterator[str]:
    """A temporary folder of rank 0, removed after all ranks have left the context."""
    with TemporaryDirectory() as mine:
        yield str(Path(loop.broadcast(mine)))
        loop.barrier()


def compiled(trial: Trial, module: nn.Module) -> Any:
    """The module compiled by `torch.compile`, if the trial has a backend."""
    return module if trial.compiler is None else torch.compile(module, backend=trial.compiler)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Repeat the batches, epoch after epoch."""
    while True:
        yield from loader


def mean(loop: Loop, loss: Tensor) -> float:
    """The mean of the loss over all ranks."""
    return float(loop.all_reduce(loss.detach()).item())


def halves(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of a model, and its vectors."""
    parameters = list(net.parameters())
    return [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]


def features(trial: Trial, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Two feature tensors of shape `(batch, width)`, computed from the tokens."""
    angles = torch.arange(1, trial.sizes.width + 1, device=tokens.device) * tokens.sum(dim=1, keepdim=True)
    return angles.to(trial.dtype).sin(), angles.to(trial.dtype).cos()
