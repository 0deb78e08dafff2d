"""One norm over gradients that lie in many ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import run_world

from fabric import Fabric
from fabric.launchers.world import World
from fabric.strategies.collectives.process_group import TorchCollective
from fabric.strategies.gradients.clipping import clip_norm, clip_value, norm_of, total_norm
from fabric.strategies.tensors.dtensor import local_part, whole

SHAPES = ((5, 6), (1, 3), (8,), (4, 4), (3,))


def whole_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def laid_out(gradients: list[Tensor]) -> list[Tensor]:
    """Plain; cut over all ranks, most of which hold nothing of it; cut over one axis; over two; replicas of shards."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layouts: list[tuple[Any, Any]] = [
        (square["tensor"], [Shard(0)]),
        (flat, [Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Shard(1)]),
    ]
    pairs = zip(gradients, layouts, strict=False)
    cut = [distribute_tensor(gradient, mesh, layout, src_data_rank=None) for gradient, (mesh, layout) in pairs]
    return [*cut, *gradients[len(layouts) :]]


def optimizer_of(gradients: list[Tensor]) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return torch.optim.SGD(parameters, lr=0.1)


def clipped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [whole(parameter.grad) for parameter in optimizer.param_groups[0]["params"]]


def clip_mixed(world: World) -> None:
    collective = TorchCollective(world, "gloo", device=torch.device("cpu"))
    collective.setup()
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        plain, mixed = optimizer_of(whole_gradients()), optimizer_of(laid_out(whole_gradients()))
        parameters = plain.param_groups[0]["params"]
        expected = nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=norm_type)
        torch.testing.assert_close(clip_norm([mixed], 0.5, norm_type, True, None), expected)
        torch.testing.assert_close(clipped(mixed), clipped(plain))
        clip_value([mixed], 0.01, None)
        nn.utils.clip_grad_value_(parameters, 0.01)
        torch.testing.assert_close(clipped(mixed), clipped(plain))

    doubles = laid_out([gradient.double() for gradient in whole_gradients()])
    expected = nn.utils.get_total_norm([gradient.double() for gradient in whole_gradients()])
    torch.testing.assert_close(total_norm(doubles, 2.0), expected, rtol=1e-14, atol=0.0)

    broken = laid_out(whole_gradients())
    if world.rank == 3:
        local_part(broken[3]).fill_(float("nan"))
    optimizer = optimizer_of(broken)
    before = [gradient.clone() for gradient in map(local_part, broken)]
    with pytest.raises(RuntimeError, match=r"The gradients' total norm of order 2.0 is nan, so they cannot be clipped"):
        clip_norm([optimizer], 1.0, 2.0, True, None)
    after = [local_part(parameter.grad) for parameter in optimizer.param_groups[0]["params"]]
    torch.testing.assert_close(after, before, equal_nan=True)
    with pytest.raises(ValueError, match=r"`norm_type=0.0` over shards: write a positive order"):
        clip_norm([optimizer], 1.0, 0.0, True, None)
    collective.teardown()


@pytest.mark.slow
def test_gradients_on_several_meshes_and_plain_ones_are_clipped_as_whole_ones_are() -> None:
    run_world(4, clip_mixed)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_plain_gradients_are_clipped_as_torch_does_bit_for_bit(norm_type: float) -> None:
    ours, theirs = optimizer_of(whole_gradients()), optimizer_of(whole_gradients())
    norm = clip_norm([ours], 0.3, norm_type, True, None)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.param_groups[0]["params"], 0.3, norm_type=norm_type))
    for mine, other in zip(clipped(ours), clipped(theirs), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_largest_gradient_is_clipped_to_as_torch_does_in_every_dtype(dtype: torch.dtype) -> None:
    both = [optimizer_of([gradient.to(dtype) for gradient in whole_gradients()]) for _ in range(2)]
    norms = [
        clip_norm([both[0]], 0.3, float("inf"), True, None),
        nn.utils.clip_grad_norm_(both[1].param_groups[0]["params"], 0.3, norm_type=float("inf")),
    ]
    assert norms[0].dtype is dtype
    assert torch.equal(*norms)
    for mine, other in zip(*map(clipped, both), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_a_nan_gradient_raises_for_a_norm_of_any_order(norm_type: float) -> None:
    gradients = whole_gradients()
    gradients[2][3] = torch.nan
    optimizer = optimizer_of(gradients)
    with pytest.raises(RuntimeError, match=r"nan|non-finite"):
        clip_norm([optimizer], 0.3, norm_type, True, None)
    assert all(torch.equal(mine, other) for mine, other in zip(clipped(optimizer)[:2], gradients[:2], strict=True))


def test_without_gradients_the_norm_is_zero() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert clip_norm([optimizer], 1.0, 2.0, True, None).item() == 0.0
    clip_value([optimizer], 1.0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_fifty_million_elements_is_that_of_float64(dtype: torch.dtype) -> None:
    tensor = torch.full((5 * 10**7 + 1,), 0.1, dtype=dtype)  # torch's norm in float32 is 3 % high on a CPU
    expected = tensor[0].item() * tensor.numel() ** 0.5
    norm = norm_of([tensor], 2.0)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    assert norm.dtype == torch.float32


def test_several_optimizers_are_clipped_by_one_norm_and_a_parameter_of_two_counts_once() -> None:
    gradients = whole_gradients()
    first, second = optimizer_of(gradients[:3]), optimizer_of(gradients[3:])
    second.add_param_group({"params": first.param_groups[0]["params"][0]})
    expected = nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(clip_norm([first, second], 0.5, 2.0, True, None), expected)
    clipped_gradients = clipped(first) + clipped(second)
    torch.testing.assert_close(nn.utils.get_total_norm(clipped_gradients), torch.tensor(0.5))


def setup_two() -> tuple[Fabric, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A model whose matrix and vector have optimizers of their own, after a backward."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    net = nn.Linear(4, 3)
    model, first, second = fabric.setup(
        net, torch.optim.SGD([net.weight], lr=0.1), torch.optim.AdamW([net.bias], lr=0.1)
    )
    fabric.backward(model(torch.ones(2, 4)).square().sum() * 100)
    return fabric, model, first, second


def test_without_an_optimizer_all_gradients_of_a_model_are_clipped_by_one_norm() -> None:
    fabric, model, first, second = setup_two()
    expected = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    for optimizers in (None, [first, second]):
        norm = fabric.clip_gradients(model, optimizers, max_norm=1.0)
        torch.testing.assert_close(norm, expected)
        expected = torch.tensor(1.0)
    fabric.close()


def test_one_optimizer_of_several_must_be_in_a_list() -> None:
    fabric, model, first, _ = setup_two()
    with pytest.raises(ValueError, match=r"`clip_gradients\(Linear, SGD\)`: 1 parameters of `Linear` .* pass a list"):
        fabric.clip_gradients(model, first, max_norm=1.0)
    assert model.bias.grad is not None
    before = model.bias.grad.clone()
    assert fabric.clip_gradients(model, [first], max_norm=1.0) is not None
    assert torch.equal(model.bias.grad, before)
    other = fabric.setup_module(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"an optimizer that was not set up"):
        fabric.clip_gradients(other, max_norm=1.0)
    fabric.close()


def test_float16_gradients_whose_norm_is_beyond_float16_are_scaled_and_not_zeroed() -> None:
    optimizer = optimizer_of([torch.full((100, 100), 6e4, dtype=torch.float16)])
    assert clip_norm([optimizer], 1.0, 2.0, True, None).item() == pytest.approx(6e6, rel=1e-3)
    torch.testing.assert_close(clipped(optimizer)[0], torch.full((100, 100), 0.01, dtype=torch.float16))
