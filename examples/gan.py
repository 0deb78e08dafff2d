"""Generate handwritten digits: a generator and a discriminator, each with an optimizer.

python examples/gan.py --devices 2
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric

NUM_NOISE = 32


def make_generator() -> nn.Module:
    """Noise `(B, 32)` to images `(B, 64)`, from -1 to 1."""
    return nn.Sequential(
        *(nn.Linear(NUM_NOISE, 256), nn.LeakyReLU(0.2)),
        *(nn.Linear(256, 256), nn.LeakyReLU(0.2)),
        *(nn.Linear(256, 64), nn.Tanh()),
    )


def make_discriminator() -> nn.Module:
    """Images `(B, 64)` to logits `(B, 1)`: above 0 for a real image."""
    return nn.Sequential(
        *(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        nn.Linear(256, 1),
    )


def make_noise(fabric: Fabric, count: int, generator: torch.Generator) -> Tensor:
    """Noise `(count, 32)`. Every rank draws for all ranks and keeps its rows: the numbers are those of one process."""
    return torch.randn(fabric.world_size, count, NUM_NOISE, generator=generator)[fabric.global_rank].to(fabric.device)


def drawn(images: Tensor) -> str:
    """Images as text, side by side."""
    shades = " .:-=+*#%@"
    levels = ((images.clamp(-1, 1) + 1) / 2 * (len(shades) - 1)).round().long()
    rows = levels.unflatten(1, (8, 8)).transpose(0, 1)
    return "\n".join(
        "   ".join("".join(shades[level] * 2 for level in image) for image in row) for row in rows.tolist()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--accelerator", "--strategy", "--devices"):
        parser.add_argument(option, default="auto")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    fabric = Fabric(accelerator=args.accelerator, strategy=args.strategy, devices=args.devices)
    fabric.launch()
    fabric.seed_everything(args.seed)

    generator, discriminator = make_generator(), make_discriminator()
    generator, generator_optimizer = fabric.setup(
        generator, torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    )
    discriminator, discriminator_optimizer = fabric.setup(
        discriminator, torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    )
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(images), args.batch_size, shuffle=True))
    draws = torch.Generator().manual_seed(args.seed)

    for _ in fabric.progress(range(args.epochs), "epochs"):
        for (real,) in loader:
            fake = generator(make_noise(fabric, len(real), draws))

            scores = discriminator(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.full_like(scores[: len(real)], 0.9), torch.zeros_like(scores[len(real) :])])
            discriminator_loss = F.binary_cross_entropy_with_logits(scores, truth)
            discriminator_optimizer.zero_grad()
            fabric.backward(discriminator_loss, model=discriminator)
            discriminator_optimizer.step()

            scores = discriminator(fake)
            generator_loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            generator_optimizer.zero_grad()
            fabric.backward(generator_loss, model=generator)
            generator_optimizer.step()

    losses = fabric.all_reduce({"generator": generator_loss.detach(), "discriminator": discriminator_loss.detach()})
    fabric.print("  ".join(f"{name} loss {loss:.3f}" for name, loss in losses.items()))
    with torch.no_grad():
        fabric.print(drawn(generator(make_noise(fabric, 6, draws))))


if __name__ == "__main__":
    main()
