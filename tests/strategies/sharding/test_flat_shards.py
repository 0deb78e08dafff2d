"""What is computed from a flat shard, without a process group: two halves of a tensor are this rank's and another's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric.strategies.sharding.flat_shards import FlatShard, hide, plain_shard, show, show_again

WHOLE = torch.Size((4, 2))


def make_shard(start: float = 1.0) -> nn.Parameter:
    """The first half of a parameter of eight elements, and of its gradient."""
    parameter = nn.Parameter(torch.arange(start, start + 4))
    parameter.grad = torch.linspace(0.5, 2, 4)
    show([parameter], "and what to write.", lambda _: WHOLE)
    return parameter


def grad(parameter: nn.Parameter) -> Any:
    return parameter.grad


BY_ELEMENT: dict[str, Callable[[nn.Parameter], Any]] = {
    "decay": lambda p: p.detach().mul_(0.9),
    "data": lambda p: p.data.mul_(0.9),
    "in place": lambda p: p.mul_(0.9),
    "a step": lambda p: p.sub_(grad(p), alpha=0.1),
    "augmented": lambda p: p.__isub__(0.1 * grad(p)),
    "adam": lambda p: p.addcdiv_(grad(p), (grad(p) * grad(p)).sqrt().add(1e-8), value=-0.1),
    "a lerp": lambda p: p.lerp_(torch.zeros_like(p), 0.1),
    "clamped": lambda p: p.clamp_(-2, 2),
    "where": lambda p: p.copy_(torch.where(p > 2, torch.zeros_like(p), p)),
    "masked": lambda p: p.masked_fill_(p > 2, 0.0),
    "sign": lambda p: p.add_(torch.sign(grad(p)), alpha=-0.1),
    "a number": lambda p: p.mul_(torch.tensor(0.5)),
    "several": lambda p: torch._foreach_mul_([p], 0.5),
    "zeros": lambda p: nn.init.zeros_(p),
    "no numbers": lambda p: p.copy_(torch.nan_to_num(p)),
    "a clone": lambda p: p.copy_(p.clone() * 2),
    "another dtype": lambda p: p.copy_(p.double() * 2),
}


def test_the_number_of_dimensions_is_that_of_the_whole_tensor() -> None:
    parameter = make_shard()
    for each in (parameter, grad(parameter), parameter.data, parameter.detach() * 2):
        assert (each.ndim, each.dim(), each.ndimension()) == (2, 2, 2)


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "norm of data": lambda p: p.data.norm(),
    "norm of gradient": lambda p: grad(p).norm(),
    "vector_norm": lambda p: torch.linalg.vector_norm(p),
    "all norms": lambda p: torch._foreach_norm([p]),
    "sum of squares": lambda p: (grad(p) ** 2).sum(),
    "sum with a graph": lambda p: p.pow(2).sum(),
    "mean": lambda p: p.detach().mean(),
    "item": lambda p: p.item(),
    "float": lambda p: float(p),
    "index": lambda p: p[0],
    "bool": lambda p: bool(p == p),
    "finite": lambda p: torch.isfinite(grad(p)).all(),
    "equal": lambda p: torch.equal(p, p),
    "allclose": lambda p: torch.allclose(p, p),
    "max": lambda p: p.max(),
    "std": lambda p: p.std(),
    "numpy": lambda p: p.detach().numpy(),
    "numpy of gradient": lambda p: grad(p).numpy(),
    "list": lambda p: p.tolist(),
    "list of gradient": lambda p: grad(p).cpu().tolist(),
    "pickle": lambda p: pickle.dumps(grad(p)),
    "pickle of the parameter": lambda p: pickle.dumps(p),
    "concatenated": lambda p: torch.cat([p.view(-1)]),
    "stacked": lambda p: torch.stack([grad(p)]),
    "matrix": lambda p: p @ torch.ones(4),
    "linear": lambda p: nn.functional.linear(torch.ones(4), p),
    "a gradient of other shape": lambda p: setattr(p, "grad", torch.ones(4, 2)),
    "whole tensor": lambda p: p.copy_(torch.ones(8)),
    "two shapes": lambda p: p.mul(other()),
    "into a plain tensor": lambda p: torch.zeros(4).copy_(p),
    "random": lambda p: nn.init.normal_(p),
    "random like": lambda p: torch.randn_like(p),
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "softmax": lambda p: p.softmax(0),
    "sorted": lambda p: p.sort(),
    "sum of cumulated": lambda p: p.cumsum(0),
}


def test_a_scaler_that_each_rank_has_of_its_own_raises_with_the_precision_to_write() -> None:
    shard = make_shard()
    optimizer, scaler = torch.optim.SGD([shard], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="Pass `precision='16-mixed'`"):
        scaler.step(optimizer)


def other() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(4))
    show([parameter], "", lambda _: torch.Size((2, 4)))
    return parameter


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_what_acts_on_each_element_of_a_shard_has_the_result_of_a_plain_tensor(name: str) -> None:
    shard, plain = make_shard(), nn.Parameter(torch.arange(1.0, 5))
    plain.grad = torch.linspace(0.5, 2, 4)
    with torch.no_grad():
        BY_ELEMENT[name](shard)
        BY_ELEMENT[name](plain)
    assert torch.equal(plain_shard(shard), plain.detach())


@pytest.mark.parametrize("name", READS)
def test_what_reads_a_shard_as_if_it_were_whole_raises_with_what_to_write(name: str) -> None:
    with torch.set_grad_enabled(name == "sum with a graph"):
        shard = make_shard()
        with pytest.raises(RuntimeError, match=r"of this rank's shard.* and what to write"):
            READS[name](shard)


def test_a_result_of_shards_is_a_shard() -> None:
    shard = make_shard()
    made = [shard * 2, shard.detach(), shard.data, shard.clone(), grad(shard), grad(shard) ** 2, shard > 0]
    made += [torch.zeros_like(shard), copy.deepcopy(shard), copy.deepcopy(grad(shard)), shard.to(torch.float64)]
    for each in made:
        assert type(each) is FlatShard
        assert each.whole == WHOLE
    assert grad(shard) is grad(shard) or type(grad(shard)) is FlatShard


def test_a_hidden_parameter_is_plain_and_remains_the_same_object_in_dicts() -> None:
    shard = make_shard()
    known = {shard: 1}
    (hidden,) = hide([shard, nn.Parameter(torch.ones(1))])
    assert hidden is shard
    assert type(shard) is nn.Parameter
    assert known[shard] == 1
    assert type(shard.grad) is Tensor
    assert shard.detach().norm() > 0
    show_again([shard])
    assert known[shard] == 1
    assert isinstance(shard, nn.Parameter)
    assert "shard of a parameter of shape (4, 2)" in repr(shard)
    assert "shard of a tensor of shape (4, 2)" in f"{shard.data!r}"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_nothing_prepared_steps_shards(kind: Any, foreach: bool) -> None:
    shard, plain = make_shard(), nn.Parameter(torch.arange(1.0, 5))
    for parameter in (shard, plain):
        optimizer = kind([parameter], lr=0.1, foreach=foreach, weight_decay=0.1)
        for _ in range(3):
            parameter.grad = torch.linspace(0.5, 2, 4)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert not plain_shard(grad(parameter)).any()
            optimizer.zero_grad()
    assert torch.equal(plain_shard(shard), plain.detach())


def test_a_gradient_may_be_replaced_by_what_was_computed_from_it() -> None:
    shard = make_shard()
    expected = plain_shard(grad(shard)) * 0.5
    shard.grad = grad(shard) * 0.5
    hide([shard])
    assert shard.grad is not None
    assert type(shard.grad) is Tensor
    assert torch.equal(shard.grad, expected)


def test_a_gradient_of_the_unsharded_shape_is_this_rank_s_own_and_plain() -> None:
    shard = make_shard()
    hide([shard])
    shard.data = torch.ones(8)
    shard.grad = torch.ones(8)
    shard.data = torch.ones(4)
    show_again([shard])
    assert type(grad(shard)) is Tensor
