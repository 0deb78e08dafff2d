"""Tests on the pretended device, in the environment of `make test-device`; anywhere else they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("pretended_cuda") is None:
    collect_ignore_glob = ["test_*.py"]
