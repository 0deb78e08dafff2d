"""Functions, arguments, results and exceptions as bytes: by reference if that works, otherwise by value.

By reference is `pickle`: a function is its name, and the reader imports its module. By value is `cloudpickle`: a
lambda, a closure, or a function or class of a notebook is its code and the globals that it refers to. `pickle.loads`
reads both.
"""

import io
import marshal
import pickle
import sys
from types import CodeType
from typing import Any


def dumps(found: Any) -> bytes:
    """Pickle the object for a process that has the same `__main__`. Raises what pickle raises."""
    try:
        return pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return _by_value(found, but_for_main=True)


def by_value(found: Any) -> bytes:
    """Pickle the object without references to `__main__`."""
    return _by_value(found, but_for_main=False)


def dumps_exception(error: BaseException) -> bytes | None:
    """Pickle the exception; None if it cannot be pickled and unpickled."""
    try:
        pickled = dumps(error)
    except (Exception, SystemExit):  # raised by the exception's own class
        return None
    return pickled if loads_exception(pickled) is not None else None


def loads_exception(pickled: bytes | None) -> BaseException | None:
    """The exception of `dumps_exception`; None if it cannot be unpickled, as many exceptions that can be pickled."""
    try:
        found = pickle.loads(pickled or b"")
    except (Exception, SystemExit):
        return None
    return found if isinstance(found, BaseException) else None


def _by_value(found: Any, *, but_for_main: bool) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, each: Any) -> Any:
            if but_for_main and isinstance(each, type) and _is_in_main(each):
                return NotImplemented  # by its name, so that an instance has the reader's own class
            if isinstance(each, CodeType):  # cloudpickle drops the file, which a traceback shows
                return marshal.loads, (marshal.dumps(each),)
            return super().reducer_override(each)

    with io.BytesIO() as file:
        Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(found)
        return file.getvalue()


def _is_in_main(kind: type) -> bool:
    return kind.__module__ == "__main__" and vars(sys.modules["__main__"]).get(kind.__qualname__) is kind
