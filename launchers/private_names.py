"""What the package uses of a library beyond its public interface: each name is looked up before anything relies on it.

One file per library lists the names, each with the reason, and has the list checked when the technique is imported:
`launchers/process/interpreter.py` (Python), `launchers/xla_internals.py`, `strategies/torch_internals.py`,
`strategies/data/huggingface.py`, and `library.py` of DeepSpeed and FairScale. `tests/test_private_names.py` fails where
a source file uses a private name that is in none of the lists.
"""

from collections.abc import Iterator, Mapping
from inspect import unwrap
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any, TypeAlias

Names: TypeAlias = Mapping[str, Mapping[str, str]]
"""Per owner, `module` or `module:Class`: names separated by blanks, `a|b` for either of two, and why they are used."""

TESTED_TORCH = "2.9 to 2.14"
"""The last version is the newest that the tests have seen; a test run over a newer one says so."""


def require(library: str, tested: str, names: Names) -> None:
    """Raise ImportError where the installed release of a library lacks one of the names.

    `tested`: the releases that the package was tested with. Imports the modules that own the names.
    """
    for owner, reasons in names.items():
        found = _found(owner)
        for several, why in reasons.items():
            for either in several.split():
                if found is None or not any(_has(found, name) for name in either.split("|")):
                    raise ImportError(
                        f"{library} {_version(library)} has no `{owner.replace(':', '.')}.{either}`, a private name "
                        f"that torchfabric relies on: {why}. torchfabric was tested with {library} {tested}: "
                        "install one of those, or a newer torchfabric."
                    )


_ABSENT = object()


def _found(owner: str) -> Any:
    try:
        return resolve_name(owner)
    except (ImportError, AttributeError):
        return None


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has the name, or the code of the class mentions it: most attributes of instances are
    set in `__init__`, and an instance is not at hand."""
    if getattr(owner, name, _ABSENT) is not _ABSENT:
        return True
    kinds = owner.__mro__ if isinstance(owner, type) else ()
    functions = (unwrap(each) for kind in kinds for each in vars(kind).values() if isinstance(each, FunctionType))
    return any(name in _mentioned(each.__code__) for each in functions if isinstance(each, FunctionType))


def _mentioned(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _mentioned(constant)
        elif isinstance(constant, str):
            yield constant


def _version(library: str) -> str:
    import platform
    from importlib.metadata import version

    return platform.python_version() if library == "Python" else version(library)
