"""The accelerator that tests train on: `Fabric(accelerator=ACCELERATOR)`, the CPU unless `pytest --accelerator cuda`.

The option is an environment variable when test modules are imported, for a test's body is imported again by each rank.
A test that is about the CPU itself, about gloo or about what a machine has, writes "cpu".
"""

from __future__ import annotations

import os

VARIABLE = "TESTS_ACCELERATOR"

ACCELERATOR = os.environ.get(VARIABLE, "cpu")
