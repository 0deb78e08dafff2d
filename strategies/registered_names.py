"""Names that the user passes as arguments, and the factories of the objects with these names.

Note [Registered names]: a `Registry` is module state, because every `Fabric` that the process creates later finds the
names in it; Python's registry of codecs works in the same way. Names are only added, and never change their meaning.
Entry points are read when a name is unknown, or when all are listed: scanning all installed distributions
takes tens of milliseconds, which a program with `accelerator="cuda"` does not pay.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, final

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A name, the factory of the object with this name, and a line that says when to use it."""

    name: str
    make: Callable[[], Any]
    description: str = ""
    source: str = "torchfabric"
    """Who registered it: torchfabric, a distribution, or this program."""


@final
class Registry(Generic[T]):
    """The names of one argument of `Fabric`, its `word`: built in, registered by the program, of installed packages.

    `entry_point_group`: in it a package names a callable without arguments that returns the object. A name that is
    taken keeps its meaning.
    """

    def __init__(self, word: str, entry_point_group: str, built_in: Iterable[Registration]) -> None:
        self._word, self._group = word, entry_point_group
        self._known = {registration.name: registration for registration in built_in}

    def all(self, *, installed: bool = True) -> dict[str, Registration]:
        """Every name with its registration; `installed=False`: without the registrations of packages. Imports no
        package."""
        found = [_of_package(entry) for entry in entry_points(group=self._group)] if installed else []
        return {**self._known, **{each.name: each for each in found if each.name not in self._known}}

    def make(self, name: str) -> T:
        """Create the object of a name. Raises: ValueError: the name is unknown."""
        registration = self._known.get(name) or self.all().get(name)
        if registration is None:
            near = "".join(f"Did you mean {match!r}? " for match in get_close_matches(name, self.all(), n=1))
            raise ValueError(
                f"`{self._word}={name!r}` is not known. {near}Write 'auto' or one of "
                f"{', '.join(map(repr, self.all()))}; `register_{self._word}` adds one."
            )
        made: T = registration.make()
        return made

    def register(self, name: str, factory: Callable[[], T], description: str = "") -> None:
        """Add a name, in this process from now on. Raises: ValueError: the name is taken."""
        if name in ("auto", *self._known):
            raise ValueError(f"`register_{self._word}({name!r}, ...)`: the name is taken. Choose another.")
        self._known[name] = Registration(name=name, make=factory, description=description, source="this program")


def _of_package(entry: EntryPoint) -> Registration:
    source = entry.dist.name if entry.dist is not None else entry.value
    return Registration(name=entry.name, make=lambda: entry.load()(), description=f"from {source}", source=source)
