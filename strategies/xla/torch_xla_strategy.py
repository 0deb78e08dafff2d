"""What the strategies over XLA share: they need torch_xla, mark steps, and train parameters of modules only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from fabric.strategies.capabilities import Capability, releases
from fabric.strategies.gradients.bare_parameters import IN_MODULE
from fabric.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class TorchXLAStrategy(Strategy):
    """A strategy over XLA devices, by torch_xla."""

    marks_steps: ClassVar[bool] = True
    launcher_name: ClassVar[str] = "inline"
    """The one launcher that can start it."""

    @property
    def lacks(self) -> Mapping[Capability, str]:
        """Unsupported capabilities. A subclass may add others."""
        return {"bare_parameters": IN_MODULE}

    @final
    @property
    def launchers(self) -> tuple[str, ...]:
        """The one launcher."""
        return (self.launcher_name,)

    @final
    def look_for_packages(self) -> Mapping[str, str]:
        """The installed release of torch_xla."""
        return releases("torch_xla")
