"""The words of the loop, on one process: what comes back, what stays as it was, and what is refused."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import fabric as fabric_package
from fabric import Fabric, strategies
from fabric.strategies.collectives.collective import CollectiveError


@pytest.fixture
def fabric() -> Any:
    with Fabric(accelerator=ACCELERATOR, devices=1) as fabric:
        yield fabric


def parts() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_the_loop_of_the_design_trains(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    loader = fabric.setup_dataloaders(DataLoader(torch.randn(32, 3), batch_size=8))
    losses = []
    for _ in range(5):
        for batch in loader:
            optimizer.zero_grad()
            loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            losses.append(fabric.all_gather(loss.detach()))
    assert losses[0].shape == (1,)  # TRAPS C1: a world dimension for one rank, too
    assert losses[-1].item() < losses[0].item()


# The user's own objects (TRAPS W1, W2, W3, G3, G6)


def test_setup_returns_the_users_own_objects(fabric: Fabric) -> None:
    model, optimizer = parts()
    scheduler = StepLR(optimizer, step_size=1)
    names = [name for name, _ in model.named_parameters()]
    result = fabric.setup(model, optimizer, scheduler=scheduler)
    assert result == (model, optimizer, scheduler)
    assert (type(model), type(optimizer)) == (nn.Sequential, SGD)
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())


def test_setup_of_only_a_module_returns_the_module(fabric: Fabric) -> None:
    model, optimizer = parts()
    assert fabric.setup_module(model) is model
    assert fabric.setup_optimizers(optimizer) is optimizer
    assert fabric.is_wrapped(model)
    assert fabric.is_wrapped(optimizer)
    assert not fabric.is_wrapped(nn.Linear(1, 1))


def test_forward_and_methods_of_a_prepared_module_register_no_hook_per_call(fabric: Fabric) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    fabric.setup(model)
    before = [dict(vars(module)) for module in model.modules()]
    model(torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    for module, attributes in zip(model.modules(), before, strict=True):
        assert {name: value for name, value in vars(module).items() if "hook" in name} == {
            name: value for name, value in attributes.items() if "hook" in name
        }
        assert set(vars(module)) == set(attributes)


def test_in_full_precision_on_one_device_forward_and_step_are_the_users_own(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    assert "forward" not in vars(model)
    assert not optimizer._optimizer_step_pre_hooks
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_optimizers_keep_hooks_and_the_value_that_step_returns(precision: str) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision=precision) as fabric:
        model, optimizer = parts()
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *args: calls.append("pre"))
        model, optimizer = fabric.setup(model, optimizer)
        optimizer.register_step_post_hook(lambda *args: calls.append("post"))
        fabric.backward(model(torch.ones(2, 3)).float().sum())
        assert optimizer.step() is None
        assert calls == ["pre", "post"]


def test_a_closure_runs_and_step_returns_its_value(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        fabric.backward(loss)
        return loss

    expected = model(torch.ones(2, 3)).square().sum()
    torch.testing.assert_close(optimizer.step(closure), expected)


def test_a_prepared_optimizer_and_module_can_be_pickled_and_copied(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    assert type(pickle.loads(pickle.dumps(optimizer))) is SGD
    average = copy.deepcopy(model)
    assert not fabric.is_wrapped(average)
    torch.testing.assert_close(average(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_copy_of_what_refers_to_its_fabric_refers_to_the_same_one_and_no_other_process_gets_it(
    fabric: Fabric,
) -> None:
    module = nn.Linear(3, 1)
    module.fabric = fabric  # type: ignore[assignment]
    model = fabric.setup(module)
    assert copy.deepcopy(model).fabric is fabric
    with pytest.raises(TypeError, match="A launched `Fabric` cannot be pickled"):
        pickle.dumps(fabric)


def test_schedulers_step_once_per_call(fabric: Fabric) -> None:
    model, optimizer = parts()
    step, plateau = StepLR(optimizer, step_size=2, gamma=0.1), None
    model, optimizer = fabric.setup(model, optimizer)
    rates = []
    for _ in range(4):
        fabric.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        step.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])
    plateau = ReduceLROnPlateau(optimizer, patience=1)
    for _ in range(3):
        plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)


def test_a_prepared_module_has_the_attributes_and_methods_of_the_users_class(fabric: Fabric) -> None:
    class Net(nn.Linear):
        answer = 42

        def ask(self) -> int:
            return self.answer

    net = fabric.setup(Net(1, 1))
    assert isinstance(net, Net)
    assert net.ask() == 42


# Precision


@pytest.mark.parametrize(
    ("precision", "parameter", "output"),
    [
        ("64-true", torch.float64, torch.float64),
        ("32-true", torch.float32, torch.float32),
        ("16-true", torch.float16, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.float32),
    ],
)
def test_a_precision_gives_parameters_and_outputs_their_dtype(
    precision: str, parameter: torch.dtype, output: torch.dtype
) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision=precision) as fabric:
        model = fabric.setup(nn.Linear(2, 2))
        assert model.weight.dtype == parameter
        assert model(torch.ones(1, 2)).dtype == output
        with fabric.init_tensor():
            assert torch.ones(1).dtype == parameter
        assert torch.ones(1).dtype == torch.float32


def test_integers_among_the_inputs_are_not_cast() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision="bf16-true") as fabric:
        model = fabric.setup(nn.Embedding(5, 2))
        assert model(torch.tensor([3])).dtype == torch.bfloat16


def test_an_overflow_under_16_mixed_skips_the_step_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision="16-mixed") as fabric:
        model, optimizer = parts()
        optimizer = Adam(model.parameters(), fused=True)  # TRAPS G4: fused works
        model, optimizer = fabric.setup(model, optimizer)
        before = [parameter.clone() for parameter in model.parameters()]
        fabric.backward(model(torch.ones(2, 3)).float().sum() * 1e30)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        assert norm is not None
        assert not norm.isfinite()
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
        assert "Skipped a step of Adam" in caplog.text


def test_init_module_makes_parameters_in_the_precisions_dtype_and_can_leave_them_uninitialised() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, precision="bf16-true") as fabric:
        with fabric.init_module():
            model = nn.Linear(4, 4)
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.abs().max() <= 0.5  # initialised: uniform within 1 / sqrt(4)
        state = torch.get_rng_state()
        with fabric.init_module(empty_init=True):
            nn.Linear(4, 4)
        assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn


# Order and arguments


def test_setting_up_twice_is_an_error(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    with pytest.raises(ValueError, match="This `Sequential` was set up before"):
        fabric.setup(model)
    with pytest.raises(ValueError, match="This `SGD` was set up before"):
        fabric.setup(nn.Linear(1, 1), optimizer)


def test_a_module_that_another_fabric_holds_is_an_error(fabric: Fabric) -> None:
    model, _ = parts()
    fabric.setup(model)
    with Fabric(accelerator=ACCELERATOR, devices=1) as other, pytest.raises(ValueError, match="Set a module up once"):
        other.setup(model)


def test_before_launch_with_several_ranks_nothing_can_be_set_up() -> None:
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy="ddp")
    for use in (lambda: fabric.setup(nn.Linear(1, 1)), lambda: fabric.all_gather(torch.ones(1)), lambda: fabric.device):
        with pytest.raises(RuntimeError, match=r"Call `fabric.launch\(\)` once, right after `Fabric\(...\)`"):
            use()


def test_launching_twice_is_an_error(fabric: Fabric) -> None:
    fabric.launch()
    with pytest.raises(RuntimeError, match="called twice"):
        fabric.launch()


def test_a_function_runs_in_this_process_when_there_is_one_rank(fabric: Fabric) -> None:
    assert fabric.launch(lambda fabric, x, y: (fabric.world_size, x, y), 2, y=3) == (1, 2, 3)


def test_backward_before_setup_says_so(fabric: Fabric) -> None:
    with pytest.raises(RuntimeError, match="Set the model up first"):
        fabric.backward(torch.ones((), requires_grad=True))


def test_a_loss_that_is_a_number_is_an_error(fabric: Fabric) -> None:
    fabric.setup(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"`fabric.backward\(loss\)` was given a `float`. Pass the tensor that"):
        fabric.backward(1.0)  # type: ignore[arg-type]


def test_clipping_takes_exactly_one_of_value_and_norm(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(*parts())
    with pytest.raises(ValueError, match="exactly one of the two"):
        fabric.clip_gradients(model, optimizer)
    with pytest.raises(ValueError, match="exactly one of the two"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0, max_norm=1.0)


def test_clipping_something_that_was_not_set_up_says_so(fabric: Fabric) -> None:
    model, optimizer = parts()
    with pytest.raises(ValueError, match="has not set up"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    fabric.setup(model)
    with pytest.raises(ValueError, match="optimizer that was not set up"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_setting_up_no_loader_or_no_optimizer_is_an_error(fabric: Fabric) -> None:
    with pytest.raises(ValueError, match="no loader"):
        fabric.setup_dataloaders()
    with pytest.raises(ValueError, match="no optimizer"):
        fabric.setup_optimizers()


def test_an_unknown_reduction_is_an_error(fabric: Fabric) -> None:
    with pytest.raises(ValueError, match="'avg'"):
        fabric.all_reduce(torch.ones(1), reduce_op="avg")  # type: ignore[arg-type]


def test_names_that_are_imported_at_their_first_use_are_listed_for_completion() -> None:
    for package in (fabric_package, strategies):
        assert {*package.__all__} <= {*dir(package)}


# Several models and optimizers


def test_several_models_share_one_backward(fabric: Fabric) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    one, two = SGD(first.parameters(), lr=0.1), SGD(second.parameters(), lr=0.1)
    fabric.setup(first, one)
    fabric.setup(second, two)
    fabric.backward(second(first(torch.ones(1, 2))).sum())
    assert first.weight.grad is not None
    first.zero_grad()
    second.zero_grad()
    fabric.backward(second(first(torch.ones(1, 2))).sum(), model=second)
    assert second.weight.grad is not None


# No side effects (TRAPS W5, D7)


def settings() -> dict[str, Any]:
    return {
        "environ": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "compile": torch.compile,
        "warn": warnings.warn,
        "filters": list(warnings.filters),
        "DataLoader": vars(DataLoader).copy(),
        "Module": vars(nn.Module).copy(),
        "Optimizer": vars(Optimizer).copy(),
        "threads": torch.get_num_threads(),
        "rng": torch.get_rng_state().tolist(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)},
    }


def test_closing_a_fabric_restores_the_process() -> None:
    before = settings()
    with Fabric(accelerator=ACCELERATOR, devices=1, deterministic=True) as fabric:
        model, _ = fabric.setup(*parts())
        torch.set_rng_state(torch.tensor(before["rng"], dtype=torch.uint8))
        assert torch.are_deterministic_algorithms_enabled()
        assert not fabric.should_stop
    assert settings() == before
    assert "mark_forward_method" not in vars(model)


def test_deterministic_can_warn_instead() -> None:
    with Fabric(accelerator=ACCELERATOR, devices=1, deterministic="warn") as fabric:
        fabric.launch()
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_fabrics_one_after_another_are_independent() -> None:
    for precision, dtype in (("64-true", torch.float64), ("32-true", torch.float32)):
        with Fabric(accelerator=ACCELERATOR, devices=1, precision=precision) as fabric:
            assert fabric.setup(nn.Linear(1, 1)).weight.dtype == dtype


def test_a_closed_fabric_can_be_launched_again(fabric: Fabric) -> None:
    fabric.launch()
    fabric.close()
    fabric.close()
    fabric.launch()
    assert fabric.world_size == 1


# Saving and stopping


def test_save_and_load_go_through_the_users_objects(fabric: Fabric, tmp_path: Path) -> None:
    model, optimizer = fabric.setup(*parts())
    fabric.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    fabric.save(tmp_path / "state", {"model": model, "optimizer": optimizer, "step": 1})
    fabric.save(tmp_path / "bare", model.state_dict())
    other, again = parts()
    state = {"model": other, "optimizer": again, "step": 0}
    assert fabric.load(tmp_path / "state", state) == {}
    assert state["step"] == 1
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    bare, _ = parts()
    fabric.load_raw(tmp_path / "bare", bare)
    torch.testing.assert_close(bare.state_dict(), model.state_dict())
    assert set(fabric.load(tmp_path / "state")) == {"model", "optimizer", "step"}


def test_a_request_to_stop_is_seen_at_the_next_read_of_should_stop(fabric: Fabric) -> None:
    assert not fabric.should_stop
    fabric.request_stop()
    assert [fabric.should_stop for _ in range(3)][-1]


def test_to_device_and_collectives_work_in_one_process(fabric: Fabric, capsys: pytest.CaptureFixture[str]) -> None:
    assert fabric.to_device({"x": torch.ones(1)})["x"].device == fabric.device
    assert fabric.broadcast({"x": [1, "two"]}) == {"x": [1, "two"]}
    assert fabric.all_reduce({"n": torch.tensor([1, 2])})["n"].dtype == torch.float32
    with fabric.rank_zero_first():
        fabric.print("hello", 3)
    fabric.barrier()
    assert "hello 3" in capsys.readouterr().out


def test_errors_name_the_position_in_the_nest(fabric: Fabric) -> None:
    with pytest.raises((TypeError, CollectiveError), match="word"):
        fabric.all_reduce({"word": "text"})


class Counter:
    """A callback."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step(self, step: int) -> None:
        self.seen.append(step)


class ListLogger:
    """Somebody's own logger."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))


def test_callbacks_and_loggers_are_called() -> None:
    callback, logger = Counter(), ListLogger()
    with Fabric(accelerator=ACCELERATOR, devices=1, callbacks=callback, loggers=[logger]) as fabric:
        fabric.call("on_step", step=3)
        fabric.call("on_something_else")
        fabric.log("loss", torch.tensor(0.5), step=1)
        fabric.log_dict({"a": 1, "b": 2.0})
    assert callback.seen == [3]
    assert logger.rows == [({"loss": 0.5}, 1), ({"a": 1, "b": 2.0}, None)]
    assert fabric.logger is logger
