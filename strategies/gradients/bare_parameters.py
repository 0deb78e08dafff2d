"""Parameters of an optimizer that are in no module: a temperature, an embedding table.

They are in no forward, so all strategies that allow them handle them alike: they are broadcast from rank 0, and each
synchronised backward averages their gradients: see `average`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies.collectives.rank_zero_broadcast import broadcast_from_rank_zero
from fabric.strategies.gradients.sync import Finish, GradientSync, average
from fabric.strategies.runtime import Runtime
from fabric.strategies.tensors.parameters import parameters_of


@final
class BareParameters(GradientSync):
    """The parameters of one fabric that are in no module, and the averaging of their gradients."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._parameters: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._parameters) and self._runtime.world.size > 1

    def __contains__(self, parameter: Tensor) -> bool:
        return any(each is parameter for each in self._parameters)

    def add(self, parameters: Sequence[Tensor], *, move: bool) -> None:
        """Move to the device (`move`), broadcast from rank 0, and average gradients from now on. Ranks: all call it."""
        new = [parameter for parameter in parameters if parameter not in self]
        if move:
            for parameter in new:
                parameter.data = parameter.data.to(self._runtime.device)
        self._parameters += new
        if self._runtime.world.size > 1:
            broadcast_from_rank_zero(self._runtime.collective, new)

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def watch(self) -> Finish | None:
        return self._average if self.synced else None

    def parameters_held(self) -> Iterable[Tensor]:
        return self._parameters

    def release(self) -> None:
        pass

    def _average(self) -> None:
        average(self._runtime.collective.for_gradients(), self._parameters)


def in_no_module(optimizers: Iterable[Optimizer], modules: Iterable[nn.Module]) -> list[tuple[Optimizer, Tensor]]:
    """The parameters of optimizers that are in none of `modules`, each with its optimizer."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return [(each, p) for each in optimizers for p in dict.fromkeys(parameters_of(each)) if id(p) not in known]


def refuse_another_model(
    module: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[tuple[Optimizer, Tensor]]
) -> None:
    """Raise ValueError if no optimizer holds a parameter of the module, although it has some to train.

    `others`: the parameters of the optimizers that are in no module. A module without parameters to train may come with
    an optimizer of parameters elsewhere, such as prompts of a frozen model.
    """
    num_held = sum(len(dict.fromkeys(parameters_of(each))) for each in optimizers)
    if not others or len(others) < num_held or not any(each.requires_grad for each in module.parameters()):
        return
    raise ValueError(
        f"`fabric.setup(module, optimizer)`: the `{type(others[0][0]).__name__}` holds no parameter of the "
        f"`{type(module).__name__}`, and of no module that was set up before, so its steps would not train it. Create "
        "it from the parameters of the module that you set up: a copy (`copy.deepcopy`) or a module that is created "
        "again has parameters of its own. Set up an optimizer of other parameters alone by `setup_optimizers`."
    )


IN_MODULE = (
    "An optimizer of this strategy holds parameters of the module that it is set up with, and no others. Make them "
    "part of the module, `self.temperature = nn.Parameter(...)`, or pass `strategy='ddp'` or 'fsdp'."
)
