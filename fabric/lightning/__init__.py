"""For code that was written for Lightning Fabric: `from fabric.lightning import Fabric, seed_everything`.

Names, arguments and defaults are that library's, implemented by the core, which does not depend on this package.
What is not supported raises, with what to write instead. Differences are in `docs/coming-from/lightning.md`.
"""

from fabric.lightning.fabric import Fabric
from fabric.lightning.utilities.seed import seed_everything
from fabric.lightning.wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped", "seed_everything"]
