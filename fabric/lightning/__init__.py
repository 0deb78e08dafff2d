"""For code that was written for Lightning Fabric: `from fabric.lightning import Fabric, seed_everything`.

Names, arguments and defaults are that library's, over the core, which knows nothing of this package and stays strict.
What cannot be carried over raises, with what to write instead. What differs is in `docs/from-lightning.md`.
"""

from __future__ import annotations

from fabric.lightning.fabric import Fabric
from fabric.lightning.utilities.seed import seed_everything
from fabric.lightning.wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped", "seed_everything"]
