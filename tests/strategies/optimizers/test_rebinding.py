"""Optimizers follow parameters that are replaced."""

from __future__ import annotations

import torch
from torch import nn

from fabric.strategies.optimizers.rebinding import rebinding


def replace_parameters(module: nn.Module) -> None:
    """What a strategy does: new objects with the same values; what was tied stays tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            new = made.setdefault(parameter, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            setattr(part, name, new)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def test_groups_keep_their_options_and_get_the_new_parameters() -> None:
    model = tied()
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias, model[1].bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    first, second = (group["params"] for group in optimizer.param_groups)
    with rebinding(model, [optimizer]):
        replace_parameters(model)
    assert first[0] is model[0].weight is model[1].weight
    assert [id(parameter) for parameter in second] == [id(model[0].bias), id(model[1].bias)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_optimizer_state_and_gradients_are_moved_to_the_new_parameters() -> None:
    model = tied()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()["state"]
    gradient = model[0].weight.grad
    with rebinding(model, [optimizer]):
        replace_parameters(model)
    torch.testing.assert_close(optimizer.state_dict()["state"], before)
    assert set(optimizer.state) == set(model.parameters())
    torch.testing.assert_close(model[0].weight.grad, gradient)


def test_parameters_of_another_model_stay() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with rebinding(model, [optimizer]):
        replace_parameters(model)
    expected = [*model.parameters(), *other.parameters()]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in expected]


def test_an_optimizer_that_keeps_its_own_list_of_parameters_follows_too() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    with rebinding(model, [optimizer]):
        replace_parameters(model)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        return loss.item()

    start = closure()
    optimizer.step(closure)
    assert closure() < start / 10
