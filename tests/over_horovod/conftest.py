"""Tests over Horovod, in the environment of `make test-horovod`; anywhere else they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("horovod") is None:
    collect_ignore_glob = ["test_*.py"]
