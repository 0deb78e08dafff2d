"""Optimizers that need whole matrices train as in one process where parameters are in shards, and resume anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, Adafactor, AdamW, Muon, Optimizer
from torch.profiler import ProfilerActivity, profile
from worlds import launch_each

from fabric import Fabric, read_checkpoint
from fabric.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ManualContext,
    ManualStrategy,
    ModelParallelStrategy,
    Parallelized,
    Pipeline,
    Strategy,
)


class Spectral(Optimizer):
    """Divides each momentum by its largest singular value: no element's update is known without all of them. Has lists
    and numbers among its states, and calls its closure again after it has changed the weights."""

    updates_each = "parameter"
    raises = False

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        for _ in range(1 if closure is None else 2):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group["lr"])
        if self.raises:
            raise KeyboardInterrupt
        return loss

    def _update(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        state.setdefault("momenta", [torch.zeros_like(parameter), torch.zeros_like(parameter)])
        state["number"] = state.get("number", 0) + 1
        for momentum, beta in zip(state["momenta"], (0.5, 0.9), strict=True):
            momentum.lerp_(parameter.grad, 1 - beta)
            parameter.sub_(momentum / torch.linalg.matrix_norm(momentum.reshape(len(momentum), -1), 2), alpha=lr)


class Trusting(Optimizer):
    """In no table. Reads norms as numbers, decides by one, calls its closure, and has sums of gradients as states."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and (parameter.grad > 1e-3).any():
                    trust = parameter.norm().item() / (1e-3 + float(parameter.grad.norm()))
                    squares, state = parameter.grad.square().sum(), self.state[parameter]
                    state["sum"] = state["sum"] + squares if state else squares
                    parameter.sub_(parameter.grad / (1 + state["sum"]), alpha=group["lr"] * min(trust, 2.0))
        return loss


class Net(nn.Module):
    """Sizes that no number of ranks divides, vectors, a frozen matrix, one that is used from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.late = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        hidden = self.frozen(self.down(torch.tanh(self.up(x))))
        return hidden + self.late(hidden) if step > 2 else hidden


def make(kind: Callable[..., Optimizer], seed: int = 0) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    model = Net().double()
    return model, optimizer_of(model, kind)


def optimizer_of(model: nn.Module, kind: Callable[..., Optimizer]) -> Optimizer:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if each.ndim != 2]
    groups = [{"params": matrices}, *([] if kind is Muon else [{"params": rest, "lr": 0.02}])]
    return kind(groups, lr=0.05)


class Alone:
    """What a fabric offers, in one process."""

    share = slice(None)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)


def train(tools: Any, model: nn.Module, optimizer: Optimizer, steps: range, *, closures: bool = False) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(12, 3, generator=generator, dtype=torch.float64)

        def closure(x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x[tools.share], step), y[tools.share])
            tools.backward(loss)
            return loss

        if closures:
            optimizer.step(closure)
        else:
            closure()
            tools.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()


def shared(fabric: Fabric, num_shares: int) -> Fabric:
    """The rows of a batch that this rank reads. Ranks of a tensor-parallel group read the same."""
    fabric.share = slice(fabric.global_rank * num_shares // fabric.world_size, None, num_shares)  # type: ignore[attr-defined]
    return fabric


def both_ways(mesh_function: Callable[[nn.Module, DeviceMesh], None] | None = None) -> Strategy:
    return ModelParallelStrategy(parallelize_fn=mesh_function or cut, shard=2, tensor=2)


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Some matrices are in shards along two axes, some along one."""
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])


STRATEGIES: dict[str, tuple[int, int, Strategy]] = {
    "fsdp": (3, 3, FSDPStrategy(auto_wrap_policy=nn.Linear)),
    "hsdp": (4, 4, FSDPStrategy(device_mesh=(2, 2))),
    "model_parallel": (4, 2, both_ways()),
    "shard_optimizer": (2, 2, DDPStrategy(shard_optimizer=True, find_unused_parameters=True)),
    "one_rank": (1, 1, FSDPStrategy()),
}
"""With their ranks, and the shares into which a batch is split."""


def launch(name: str, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What the function returns for each of several tuples of arguments, in the same ranks."""
    size, num_shares, strategy = STRATEGIES[name]
    return launch_each(size, function, [(strategy, num_shares, *each) for each in calls], precision="64-true")


def weights(fabric: Fabric, model: nn.Module) -> dict[str, Tensor]:
    return fabric.state_dict(model, all_ranks=True)


def trained(fabric: Fabric, num_shares: int, kind: Callable[..., Optimizer], closures: bool) -> Any:
    """The weights; how many elements each rank has states of; whether the optimizer has its own parameters."""
    tools = shared(fabric, num_shares)
    model, given = make(kind)
    model, optimizer = fabric.setup(model, given)
    train(tools, model, optimizer, range(3), closures=closures)
    own = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = sum(parameter.numel() for parameter in optimizer.state)
    train(tools, model, optimizer, range(3, 6), closures=closures)
    return weights(fabric, model), fabric.all_gather(torch.tensor(held)).tolist(), own.issuperset(map(id, parameters))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "closures"),
    [
        *((name, kind, False) for name in STRATEGIES for kind in (Muon, Adafactor, Spectral)),
        *((name, Spectral, True) for name in ("fsdp", "shard_optimizer")),
    ],
)
def test_whole_parameters_are_stepped_by_one_owner_each_as_in_one_process(
    name: str, kind: Callable[..., Optimizer], closures: bool
) -> None:
    [(found, held, has_own)] = launch(name, trained, [(kind, closures)])
    model, optimizer = make(kind)
    train(Alone(), model, optimizer, range(6), closures=closures)
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-9, atol=1e-9)
    assert has_own
    matrices, vectors = 5 * 8 + 8 * 3, 8 + 3
    assert sum(held) == matrices + (0 if kind is Muon else vectors)  # each state is on one rank


@pytest.mark.slow
@pytest.mark.parametrize(("name", "closures"), [("fsdp", True), ("hsdp", False), ("model_parallel", False)])
def test_numbers_that_an_optimizer_of_no_table_reads_in_a_step_are_those_of_whole_parameters(
    name: str, closures: bool
) -> None:
    [(found, _, _)] = launch(name, trained, [(Trusting, closures)])
    model, optimizer = make(Trusting)
    train(Alone(), model, optimizer, range(6), closures=closures)
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-9, atol=1e-9)


# Saving and loading


def save_and_go_on(fabric: Fabric, num_shares: int, path: str, kind: Callable[..., Optimizer]) -> dict[str, Tensor]:
    tools = shared(fabric, num_shares)
    model, optimizer = fabric.setup(*make(kind))
    train(tools, model, optimizer, range(3))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    train(tools, model, optimizer, range(3, 6))
    return weights(fabric, model)


def load_and_go_on(fabric: Fabric, num_shares: int, path: str, kind: Callable[..., Optimizer]) -> dict[str, Tensor]:
    tools = shared(fabric, num_shares)
    model, optimizer = fabric.setup(*make(kind, seed=1))
    train(tools, model, optimizer, range(2))  # states of its own, to be replaced
    fabric.load(path, {"model": model, "optimizer": optimizer})
    fabric.save(f"{path}.again", {"model": model, "optimizer": optimizer})
    train(tools, model, optimizer, range(3, 6))
    return weights(fabric, model)


def set_up_apart(fabric: Fabric, num_shares: int, content: Any, kind: Callable[..., Optimizer]) -> list[Any]:
    """One optimizer has states before it is set up with its model; another is set up after it, and loads by hand."""
    tools = shared(fabric, num_shares)
    model, optimizer = make(kind, seed=1)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(deepcopy(content["optimizer"]))
    model, optimizer = fabric.setup(model, optimizer)
    other = make(kind)[0]
    other.load_state_dict(content["model"])
    other = fabric.setup_module(other)
    late = fabric.setup_optimizers(optimizer_of(other, kind))
    late.load_state_dict(content["optimizer"])
    train(tools, model, optimizer, range(3, 6))
    train(tools, other, late, range(3, 6))
    return [weights(fabric, model), weights(fabric, other)]


def load_and_set_up(
    fabric: Fabric, num_shares: int, path: str, content: Any, kind: Callable[..., Optimizer]
) -> list[dict[str, Tensor]]:
    """The weights of a run that loads `path`, and of two that are set up apart from `content`, where it is given."""
    loaded = load_and_go_on(fabric, num_shares, path, kind)
    return [loaded, *(set_up_apart(fabric, num_shares, content, kind) if content is not None else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Adafactor, Spectral])
def test_states_of_owners_are_saved_under_the_users_names_and_resume_anywhere(
    kind: Callable[..., Optimizer], tmp_path: Path
) -> None:
    close = {"rtol": 1e-9, "atol": 1e-9}
    model, optimizer = make(kind)
    train(Alone(), model, optimizer, range(3))
    content = deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    train(Alone(), model, optimizer, range(3, 6))
    expected = dict(model.state_dict())
    path = str(tmp_path / "fsdp")
    torch.testing.assert_close(launch("fsdp", save_and_go_on, [(path, kind)]), [expected], **close)
    saved = read_checkpoint(path, ["model", "optimizer"])
    torch.testing.assert_close(saved["optimizer"]["state"], content["optimizer"]["state"], **close)
    for name in ("shard_optimizer", "hsdp", "model_parallel", "one_rank", "fsdp"):
        given = content if name == "model_parallel" else None
        [found] = launch(name, load_and_set_up, [(path, given, kind)])
        torch.testing.assert_close(found, [expected] * (3 if given else 1), **close)
        path = f"{path}.again"
    alone, other = make(kind, seed=1)
    again = read_checkpoint(path, ["model", "optimizer"])
    alone.load_state_dict(again["model"])
    other.load_state_dict(again["optimizer"])
    train(Alone(), alone, other, range(3, 6))
    torch.testing.assert_close(dict(alone.state_dict()), expected, **close)


# What a step sends, and what is refused

LARGE = 1472
"""Columns of a matrix that takes more than half of what a message holds."""


def counted(
    fabric: Fabric, num_shares: int, kind: Callable[..., Optimizer], width: int
) -> tuple[int, dict[str, Tensor]]:
    """The messages to owners and back of one step, and the weights after it."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(5)))
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, (index + 1) / width)
    model, optimizer = fabric.setup(model, kind(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, width, dtype=torch.float64)).sum())
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        optimizer.step()
    found = sum(event.name == "c10d::alltoall_base_" for event in recorded.events() or ())
    return found, {name: tensor[0, 0] for name, tensor in weights(fabric, model).items()}


@pytest.mark.slow
def test_messages_are_packed_and_there_are_none_for_optimizers_that_update_each_element_alone() -> None:
    of_one = launch("one_rank", counted, [(Adafactor, 8), (Adafactor, LARGE)])
    assert [number for number, _ in of_one] == [0, 0]
    (of_adam, _), *of_fsdp = launch("fsdp", counted, [(AdamW, 8), (Adafactor, 8)])
    assert of_adam == 0
    of_hsdp = launch("hsdp", counted, [(Adafactor, 8)])
    of_replicas = launch("shard_optimizer", counted, [(Adafactor, 8), (Adafactor, LARGE)])
    assert [number for number, _ in (*of_fsdp, *of_hsdp, *of_replicas)] == [2, 2, 1, 2]
    for _, after in (*of_fsdp, *of_hsdp, of_replicas[0]):
        torch.testing.assert_close(after, of_one[0][1])
    torch.testing.assert_close(of_replicas[1][1], of_one[1][1])


def stepped_wrongly(fabric: Fabric) -> None:
    """A step that was interrupted, the state of one rank alone, parameters that are taken out of their group."""
    given, made = make(Spectral)
    assert isinstance(made, Spectral)
    model, optimizer = fabric.setup(given, made)
    fabric.backward(model(torch.ones(2, 5, dtype=torch.float64), 0).sum())
    with pytest.raises(
        RuntimeError, match=r"this rank has only the state of the parameters that it steps\. `fabric.save"
    ):
        optimizer.state_dict()
    taken = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="Parameters of `Spectral` were taken out of its groups"):
        optimizer.step()
    optimizer.param_groups[0]["params"].append(taken)
    optimizer.raises = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.raises = False
    with pytest.raises(RuntimeError, match="The last step of `Spectral` raised an error: its owners have changed"):
        optimizer.step()


@pytest.mark.slow
def test_what_a_rank_alone_does_to_the_optimizer_raises() -> None:
    Fabric(accelerator="cpu", devices=3, strategy="fsdp", launcher="forkserver", sanitize=False).launch(stepped_wrongly)


def cut_all(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["shard"])


def cut_by_hand(module: nn.Module, context: ManualContext) -> Parallelized:
    fully_shard(module, mesh=context.mesh)
    return Parallelized(module=module, averaged=())


def layer_of(model: nn.Sequential, stage: int, num_stages: int) -> nn.Sequential:
    return model[stage : stage + 1]


def refused(fabric: Fabric, kind: Callable[..., Optimizer], words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match=words):
        fabric.setup(model, kind(model.parameters()))


@pytest.mark.slow
def test_optimizers_that_would_train_to_other_numbers_are_refused_in_setup() -> None:
    stages = Pipeline(degree=2, num_microbatches=2, split=layer_of, loss_fn=mse_loss)
    whole = "`Muon` steps whole parameters, and {} has parameters in shards. Do not shard them"
    at_once = "`LBFGS` computes each step from the gradients of all parameters at once, which are in shards here. Use"
    cases: list[tuple[int, Strategy, Callable[..., Optimizer], str]] = [
        (4, ModelParallelStrategy(parallelize_fn=cut_all, pipeline=stages, shard=2), Muon, whole.format("a stage.*")),
        (2, ManualStrategy(parallelize=cut_by_hand), Muon, whole.format("the model that `parallelize` returned")),
        (2, FSDPStrategy(), LBFGS, at_once),
        (2, ModelParallelStrategy(parallelize_fn=cut_all, shard=2), LBFGS, at_once),
    ]
    for size in (2, 4):
        launch_each(size, refused, [each for of_size, *each in cases if of_size == size])
