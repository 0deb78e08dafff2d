"""Classify handwritten digits with a small CNN. The plain loop; `digits.py` is the same on any number of processes."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


def make_model() -> nn.Module:
    """Images `(B, 1, 8, 8)` to logits `(B, 10)`."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 2 * 2, 10)),
    )


def make_data() -> list[TensorDataset]:
    """The 1797 digits of scikit-learn: four fifths for training, the rest for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    split = torch.Generator().manual_seed(0)
    return random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2], split)


def count_right(model: nn.Module, loader: DataLoader) -> Tensor:
    """The number of correct predictions, and of images."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            right = model(images).argmax(dim=1) == labels
            counts += torch.tensor([right.sum(), len(right)])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    learn, test = make_data()
    learn_loader = DataLoader(learn, args.batch_size, shuffle=True)
    test_loader = DataLoader(test, args.batch_size)

    for epoch in range(args.epochs):
        model.train()
        for images, labels in learn_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        right, count = count_right(model, test_loader)
        print(f"epoch {epoch}: {right / count:.2%} of {count:.0f} held-out digits")
    if right / count < 0.97:
        raise SystemExit(f"Only {right / count:.2%} of the held-out digits are read right; 97% are expected.")


if __name__ == "__main__":
    main()
