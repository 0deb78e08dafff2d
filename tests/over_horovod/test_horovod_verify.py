"""`fabric verify` over Horovod: a right program is equal to one process, and a wrong factor is found."""

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.testing import verify


def train(fabric: Fabric, factor: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(data, 4, shuffle=True)):
        fabric.backward(model(batch).square().mean() * fabric.world_size**factor)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0, "The numbers of one process: horovod on 2 ranks is equal in 3 steps"),
        (1, "the gradient of `0.weight` under horovod on 2 ranks is 2 times (the number of ranks)"),
    ],
    ids=["right", "wrong"],
)
def test_a_program_over_horovod_is_compared_with_one_process(factor: int, words: str) -> None:
    verdict = verify(train, factor, strategy="horovod", steps=3)
    assert verdict.is_equal == (factor == 0)
    assert words in verdict.sentence
