"""What is said where Horovod is not installed; the tests over it are in `tests/over_horovod`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from devices import ACCELERATOR

from fabric import Fabric


@pytest.mark.skipif(find_spec("horovod") is not None, reason="Horovod is installed here")
def test_without_horovod_the_constructor_says_how_to_build_it() -> None:
    words = (
        r"needs Horovod, which cannot be imported here: .* run `tests/over_horovod/build_wheel\.sh python wheels && "
    )
    with pytest.raises(ValueError, match=words):
        Fabric(accelerator=ACCELERATOR, strategy="horovod", devices=2)
