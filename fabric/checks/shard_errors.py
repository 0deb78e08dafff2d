"""A note on an error of torch's that a parameter in shards may have caused: torch names neither parameter nor shard."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

WORDS = re.compile(
    r"got mixed torch\.Tensor and DTensor|in-place operations that require placement changes|size of tensor a \(\d+\) "
    r"must|size mismatch, got|Dimension out of range|too many indices for tensor|is invalid for input of size"
)
"""What torch says of a mask, a penalty, a norm of rows, slow weights, and `torch.nn.utils.prune`."""


def explain_shards(error: BaseException) -> None:
    """Add the note, where the error may be of a shard. Python 3.10 has no notes."""
    if sys.version_info >= (3, 11) and WORDS.search(str(error)) and _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


@contextmanager
def shards_explained() -> Iterator[None]:
    """Context: an uncaught exception has the note before it is reported."""
    before = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain_shards(error)
        before(kind, error, trace)

    sys.excepthook = explain
    try:
        yield
    finally:
        if sys.excepthook is explain:
            sys.excepthook = before


_NOTE = (
    "If one of these tensors is a parameter: outside of the model's forward, it is this rank's shard. Read parameters "
    "within `fabric.gathered(model)`, where they are whole, change them within `fabric.gathered(model, write=True)`, "
    "and prune before `fabric.setup`."
)
