"""Types that programs import, and reductions."""

import os
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp

_PATH: TypeAlias = str | os.PathLike[str]


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
