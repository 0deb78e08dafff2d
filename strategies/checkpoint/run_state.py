"""The name under which a checkpoint has the state of the run, beside the user's objects.

Random generators, loss scales, schedulers, numbers of steps and positions of loaders, which
`fabric/checkpoints/run_state.py` reads and restores.
"""

from __future__ import annotations

NAME = "fabric"
"""The name of the entry in a checkpoint."""
