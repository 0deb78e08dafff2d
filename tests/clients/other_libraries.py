"""Programs with models, optimizers and data of other libraries. Each runs unchanged in one process and on ranks.

A program returns the losses of the global batches, and its model. At the top level: ranks import them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fabric import Fabric

Program: TypeAlias = "Callable[[Fabric, str], tuple[list[float], nn.Module]]"
GLOBAL = 8
"""Rows of a batch over all ranks."""


def schedule_free(fabric: Fabric, path: str) -> tuple[list[float], nn.Module]:
    """Trains and evaluates other weights, in turns."""
    from schedulefree import AdamWScheduleFree

    net = layers()
    model, optimizer = fabric.setup(net, AdamWScheduleFree(net.parameters(), lr=0.01, warmup_steps=2))
    losses = []
    for inputs, targets in rows(fabric):
        optimizer.train()
        losses.append(step(fabric, optimizer, cross_entropy(model(inputs), targets)))
        optimizer.eval()
        with torch.no_grad():
            losses.append(mean(fabric, cross_entropy(model(inputs), targets)))
    return losses, model


def resumed(fabric: Fabric, path: str) -> tuple[list[float], nn.Module]:
    """An optimizer with a `load_state_dict` of its own, resumed in the middle."""
    from pytorch_optimizer import AdEMAMix

    losses = []
    for part in range(2):
        net = layers()
        model, optimizer = fabric.setup(net, AdEMAMix(net.parameters(), lr=0.01))
        if part:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        batches = list(rows(fabric))
        for inputs, targets in batches[4:] if part else batches[:4]:
            losses.append(step(fabric, optimizer, cross_entropy(model(inputs), targets)))
        fabric.save(path, {"model": model, "optimizer": optimizer})
    return losses, model


def tensor_dicts(fabric: Fabric, path: str) -> tuple[list[float], nn.Module]:
    """Batches, inputs and outputs are `TensorDict`s."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    net = TensorDictModule(layers(), in_keys=["inputs"], out_keys=["logits"])
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    losses = []
    for inputs, targets in rows(fabric):
        batch = model(TensorDict({"inputs": inputs, "targets": targets}, batch_size=[len(inputs)]))
        losses.append(step(fabric, optimizer, cross_entropy(batch["logits"], batch["targets"])))
    return losses, model


def graphs(fabric: Fabric, path: str) -> tuple[list[float], nn.Module]:
    """Batches of graphs by PyG's own loader."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    generator = torch.Generator().manual_seed(5)
    data = [
        Data(
            x=torch.randn(5, 16, generator=generator),
            edge_index=torch.randint(0, 5, (2, 12), generator=generator),
            y=torch.randint(0, 4, (1,), generator=generator),
        )
        for _ in range(4 * GLOBAL)
    ]
    net = Convolution()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=GLOBAL // fabric.world_size))
    return [step(fabric, optimizer, cross_entropy(model(batch), batch.y)) for batch in loader], model


class Convolution(nn.Module):
    """One graph convolution, and the mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.convolution, self.out = GCNConv(16, 8), nn.Linear(8, 4)

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        hidden = self.convolution(batch.x, batch.edge_index).relu()
        found: Tensor = self.out(global_mean_pool(hidden, batch.batch))
        return found


def quantized(fabric: Fabric, path: str) -> tuple[list[float], nn.Module]:
    """A codebook of moving averages, which the library itself adds up over the ranks."""
    net = Quantized()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    losses = []
    for inputs, _ in rows(fabric):
        decoded, commitment = model(inputs)
        losses.append(step(fabric, optimizer, mse_loss(decoded, inputs) + commitment))
    return losses, model


class Quantized(nn.Module):
    """Encoder, codebook, decoder."""

    def __init__(self) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
        self.codebook = VectorQuantize(dim=8, codebook_size=16, decay=0.8)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        codes, _, commitment = self.codebook(self.encoder(inputs)[:, None])
        return self.decoder(codes[:, 0]), commitment.sum()


def reinforced(fabric: Fabric, path: str) -> tuple[list[float], nn.Module]:
    """Each rank acts in its own environments, and the policy returns a distribution beside a value."""
    import gymnasium

    number = 4 // fabric.world_size
    environments = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * number)
    net = ActorCritic()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.001))
    start = fabric.global_rank * number
    now = torch.as_tensor(environments.reset(seed=list(range(start, start + number)))[0])
    losses = []
    for _ in range(3):
        observed, acted, rewarded = [], [], []
        for _ in range(8):
            with torch.no_grad():
                actions = model(now)[0].probs.argmax(dim=-1)
            following, rewards, *_ = environments.step(actions.numpy())
            observed, acted = [*observed, now], [*acted, actions]
            rewarded.append(torch.as_tensor(rewards, dtype=torch.float32))
            now = torch.as_tensor(following)
        policy, value = model(torch.cat(observed))
        advantage = torch.cat(rewarded) - value
        loss = advantage.square().mean() - (policy.log_prob(torch.cat(acted)) * advantage.detach()).mean()
        losses.append(step(fabric, optimizer, loss - 0.01 * policy.entropy().mean(), clipped=model))
    return losses, model


class ActorCritic(nn.Module):
    """Of CartPole."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, observations: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        return torch.distributions.Categorical(logits=self.actor(observations)), self.critic(observations)[:, 0]


PROGRAMS: dict[str, Program] = {
    program.__name__: program for program in (schedule_free, resumed, tensor_dicts, graphs, quantized, reinforced)
}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def rows(fabric: Fabric) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's rows of eight batches."""
    generator = torch.Generator().manual_seed(1)
    own = slice(fabric.global_rank, None, fabric.world_size)
    for _ in range(8):
        inputs, targets = (
            torch.randn(GLOBAL, 16, generator=generator),
            torch.randint(0, 4, (GLOBAL,), generator=generator),
        )
        yield inputs[own], targets[own]


def step(fabric: Fabric, optimizer: torch.optim.Optimizer, loss: Tensor, clipped: nn.Module | None = None) -> float:
    """One step with the gradients of a loss; returns its mean over the ranks. `clipped`: the model, to clip them."""
    optimizer.zero_grad()
    fabric.backward(loss)
    if clipped is not None:
        fabric.clip_gradients(clipped, optimizer, max_norm=0.5)
    optimizer.step()
    return mean(fabric, loss)


def mean(fabric: Fabric, loss: Tensor) -> float:
    return float(fabric.all_reduce(loss.detach()))


def run_all(fabric: Fabric, names: Iterable[str], folder: str) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """The losses of each program, and the weights at its end."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        losses, model = PROGRAMS[name](fabric, f"{folder}/{name}")
        found[name] = losses, fabric.state_dict(model)
    return found
