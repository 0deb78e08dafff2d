"""Scaled runs give the numbers of unscaled ones, bit for bit: the factors are powers of two."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fabric.strategies.gradients.clipping import clip_norm, clip_value
from fabric.strategies.precision.loss_scaler import LossScaler, all_finite


def model_and_data() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Linear(4, 2), torch.randn(5, 4)


def loss_of(model: nn.Module, data: torch.Tensor, step: int) -> torch.Tensor:
    return model(data + step).square().mean()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS = [
    lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    lambda parameters: Adam(parameters, lr=0.1, foreach=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["sgd", "adamw-fused", "adam-foreach"])
def test_weights_equal_those_of_an_unscaled_run(make: object) -> None:
    results = []
    for scaled in (False, True):
        model, data = model_and_data()
        optimizer: Optimizer = make(model.parameters())  # type: ignore[operator]
        scaler = LossScaler(growth_interval_steps=2)  # the scale grows while it runs
        if scaled:
            scaler.attach(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, data, step)
            (scaler.scale_loss(loss) if scaled else loss).backward()
            optimizer.step()
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_an_overflow_moves_neither_weights_nor_momentum_nor_step_counts_and_is_reported_once() -> None:
    model, data = model_and_data()
    optimizer = AdamW(model.parameters(), lr=0.1)
    sentences: list[str] = []
    scaler = LossScaler(init_scale=8.0, report=sentences.append)
    scaler.attach(optimizer)
    scaler.scale_loss(loss_of(model, data, 0)).backward()
    optimizer.step()
    before = weights(model), [{**state} for state in optimizer.state.values()]
    assert not optimizer.step_was_skipped  # type: ignore[attr-defined]
    optimizer.zero_grad()
    scaler.scale_loss(loss_of(model, data, 1) * float("inf")).backward()
    optimizer.step()
    torch.testing.assert_close(weights(model), before[0], rtol=0, atol=0)
    assert [float(state["step"]) for state in optimizer.state.values()] == [1.0, 1.0]
    assert scaler.num_skipped == 1
    assert optimizer.step_was_skipped  # type: ignore[attr-defined]
    assert sentences == ["Skipped a step of AdamW: its gradients overflowed at a loss scale of 8. The next scale is 4."]
    assert model.weight.grad is not None  # the user still sees what overflowed
    optimizer.zero_grad()
    scaler.scale_loss(loss_of(model, data, 2)).backward()
    optimizer.step()
    assert scaler.scale == 4.0
    assert not torch.equal(model.weight, before[0][0])


def test_clipping_sees_true_gradients() -> None:
    norms, clipped = [], []
    for scaled in (False, True):
        model, data = model_and_data()
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = LossScaler() if scaled else None
        if scaler is not None:
            scaler.attach(optimizer)
        loss = loss_of(model, data, 0)
        (loss if scaler is None else scaler.scale_loss(loss)).backward()
        norms.append(clip_norm([optimizer], 0.1, 2.0, True, scaler))
        clip_value([optimizer], 0.01, scaler)
        optimizer.step()
        clipped.append(weights(model))
    torch.testing.assert_close(norms[0], norms[1], rtol=0, atol=0)
    torch.testing.assert_close(clipped[0], clipped[1], rtol=0, atol=0)


def test_a_norm_that_overflowed_skips_the_step_instead_of_raising() -> None:
    model, data = model_and_data()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = LossScaler()
    scaler.attach(optimizer)
    before = weights(model)
    scaler.scale_loss(loss_of(model, data, 0) * float("inf")).backward()
    assert not clip_norm([optimizer], 1.0, 2.0, True, scaler).isfinite()
    optimizer.step()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert scaler.num_skipped == 1


def test_optimizers_that_are_clipped_together_skip_their_steps_together() -> None:
    scaler = LossScaler()
    (model, data), (other, _) = model_and_data(), model_and_data()
    optimizers = [SGD(each.parameters(), lr=0.1) for each in (model, other)]
    for optimizer in optimizers:
        scaler.attach(optimizer)
    before = weights(other)
    scaler.scale_loss(loss_of(model, data, 0) * float("inf") + loss_of(other, data, 0)).backward()
    clip_norm(optimizers, 1.0, 2.0, True, scaler)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(weights(other), before, rtol=0, atol=0)
    assert scaler.num_skipped == 2


def test_without_a_scaler_a_norm_that_is_not_finite_raises() -> None:
    model, data = model_and_data()
    optimizer = SGD(model.parameters(), lr=0.1)
    (loss_of(model, data, 0) * float("inf")).backward()
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 is nan, so they cannot be clipped"):
        clip_norm([optimizer], 1.0, 2.0, True, None)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_backwards_clips_and_steps_of_two_optimizers_equals_the_unscaled_one(seed: int) -> None:
    results = []
    for scaled in (False, True):
        generator = torch.Generator().manual_seed(seed)
        models = [model_and_data()[0], model_and_data()[0]]
        data = model_and_data()[1]
        optimizers = [SGD(model.parameters(), lr=0.01, momentum=0.5) for model in models]
        scaler = LossScaler(growth_interval_steps=1, init_scale=2.0) if scaled else None
        for optimizer in optimizers:
            if scaler is not None:
                scaler.attach(optimizer)
        for step in range(20):
            action = int(torch.randint(4, (), generator=generator))
            which = int(torch.randint(2, (), generator=generator))
            if action < 2:
                loss = loss_of(models[which], data, step % 3)
                if action == 1:
                    loss = loss + loss_of(models[1 - which], data, step % 3)
                (loss if scaler is None else scaler.scale_loss(loss)).backward()
            elif action == 2:
                optimizers[which].step()
                if step % 2:
                    optimizers[which].zero_grad()
            elif any(p.grad is not None for p in models[which].parameters()):
                clip_norm([optimizers[which]], 1.0, 2.0, True, scaler)
        results.append([*weights(models[0]), *weights(models[1])])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_closure_is_refused() -> None:
    model, _ = model_and_data()
    optimizer = SGD(model.parameters(), lr=0.1)
    LossScaler().attach(optimizer)
    with pytest.raises(RuntimeError, match="Call `step\\(\\)` without a closure, or choose `precision='bf16-mixed'`"):
        optimizer.step(lambda: torch.tensor(0.0))


def test_detaching_leaves_the_optimizer_as_it_was() -> None:
    model, data = model_and_data()
    optimizer = SGD(model.parameters(), lr=0.1)
    LossScaler().attach(optimizer)()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    loss_of(model, data, 0).backward()
    optimizer.step()


def test_a_scaler_resumes_from_its_state() -> None:
    model, data = model_and_data()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(growth_interval_steps=3)
    scaler.attach(optimizer)
    for step in range(2):
        scaler.scale_loss(loss_of(model, data, step)).backward()
        optimizer.step()
    again = LossScaler(growth_interval_steps=3)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == {"scale": 65536.0, "good_steps": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_finite_unless_one_is_not_however_large_they_are(dtype: torch.dtype) -> None:
    largest = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)
    place = torch.tensor([[1]])
    sparse = torch.sparse_coo_tensor(place, torch.ones(1, 4, dtype=dtype), (3, 4), check_invariants=True)
    gradients = [largest, -largest.t(), torch.zeros(0, dtype=dtype), sparse]
    assert all_finite(gradients)
    assert all_finite([])
    for wrong in (float("nan"), float("inf"), float("-inf")):
        assert not all_finite([*gradients, torch.tensor([0.0, wrong], dtype=dtype)])
        assert not all_finite([*gradients, sparse * wrong])


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_between_backward_and_step_gradients_are_those_of_an_unscaled_run(num_backwards: int) -> None:
    results = []
    for scaled in (False, True):
        model, data = model_and_data()
        optimizer = AdamW(model.parameters(), lr=0.1)
        scaler = LossScaler()
        if scaled:
            scaler.attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(num_backwards):
                loss = loss_of(model, data, step + part)
                (scaler.scale_loss(loss) if scaled else loss).backward()
                scaler.finish_backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            results.append([norm, *weights(model)])
    torch.testing.assert_close(results[:3], results[3:], rtol=0, atol=0)


def test_a_step_whose_gradients_overflowed_is_skipped_after_any_clipping() -> None:
    model, data = model_and_data()
    optimizer = AdamW(model.parameters(), lr=0.1)
    scaler = LossScaler(init_scale=8.0)
    scaler.attach(optimizer)
    before = weights(model)
    scaler.scale_loss(loss_of(model, data, 0) * 1e38).backward()
    scaler.finish_backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    assert optimizer.step_was_skipped  # type: ignore[attr-defined]
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
