"""What a strategy puts around forward, on the user's own module.

The module keeps its class and its place: an attribute `forward` of the instance runs the strategy's part and then the
user's method. Other methods that compute a loss are marked to run the same way. Nothing is registered per call, a
nested call runs once, and copies and pickles of a prepared module are plain modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias, final

import torch
from torch import nn

from fabric.strategies.copies import forget_copied_hooks

Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`around(function, args, kwargs)` runs `function` the strategy's way and returns what it returned."""


@final
class ForwardPath:
    """The methods of one module that run the strategy's way. `around=None`: nothing to do around them.

    `on_mark`: called with the name of each further method before it is replaced, and may replace it itself.
    `uncompilable`: what a compiled call raises, where the strategy's part cannot run within one.
    """

    def __init__(
        self,
        module: nn.Module,
        around: Around | None,
        on_mark: Callable[[str], None] = lambda name: None,
        uncompilable: str | None = None,
    ) -> None:
        _forget_original(module)
        if "mark_forward_method" in dir(module):
            raise ValueError(
                f"`{type(module).__name__}` already has a `mark_forward_method`: it was set up before, or defines "
                "one. Set a module up once, and name a method of your own differently."
            )
        self.module = module
        self.around = around
        self._on_mark = on_mark
        self.uncompilable = uncompilable
        self.running = False
        self._given: dict[str, Any] = {}
        self._replace("forward")
        object.__setattr__(module, "mark_forward_method", _Mark(self))

    def mark(self, method: str | Callable[..., Any]) -> None:
        """Let another method run the way forward does. Raises TypeError/AttributeError where there is none."""
        name = method if isinstance(method, str) else method.__name__
        if name in self._given:
            return
        if not callable(getattr(self.module, name, None)):
            raise AttributeError(
                f"`mark_forward_method({name!r})`: `{type(self.module).__name__}` has no method `{name}`. "
                "Write the name of a method of the module that was passed to `setup`."
            )
        given = vars(self.module).get(name)
        self._on_mark(name)
        self._replace(name)
        self._given[name] = given

    def given(self, name: str) -> Any:
        """The attribute of the instance that was replaced; None where the class has the method."""
        return self._given.get(name)

    def release(self) -> None:
        """Leave the module as it was given."""
        for name, given in self._given.items():
            if given is None:
                vars(self.module).pop(name, None)
            else:
                object.__setattr__(self.module, name, given)
        object.__delattr__(self.module, "mark_forward_method")

    def _replace(self, name: str) -> None:
        if self.around is not None:
            self._given[name] = vars(self.module).get(name)
            method = _Method(self, self.around, name, getattr(self.module, name))
            object.__setattr__(self.module, name, method)


@final
class _Method:
    """A method of the user's module, run the strategy's way."""

    def __init__(self, path: ForwardPath, around: Around, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._path, self._around, self._name, self._function = path, around, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # our part stays outside of the graph; the user's method within is compiled
            return _uncompiled(self._run if self._path.uncompilable is None else self._refuse, args, kwargs)
        return self._run(args, kwargs)

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RuntimeError(self._path.uncompilable)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._path
        if path.running:  # forward called by a marked method, or by itself
            return self._function(*args, **kwargs)
        path.running = True
        try:
            return self._around(self._function, args, kwargs)
        finally:
            path.running = False

    def __reduce__(self) -> tuple[Any, ...]:
        given = self._path.given(self._name)
        if given is not None:  # an attribute of the instance before `setup`
            return _itself, (given,)
        return getattr, (self._path.module, self._name)  # of a copy: there it finds the method of the class


@final
class _Mark:
    """`module.mark_forward_method`."""

    def __init__(self, path: ForwardPath) -> None:
        self._path = path

    def __call__(self, method: str | Callable[..., Any]) -> None:
        self._path.mark(method)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_not_prepared, type(self._path.module).__name__)


def _not_prepared(name: str, method: str | Callable[..., Any]) -> None:
    raise RuntimeError(
        f"`mark_forward_method({method!r})` on a copy of a prepared `{name}`: a copy is a plain module. "
        "Pass the copy to `fabric.setup` first."
    )


def _itself(given: Any) -> Any:
    return given


def _forget_original(module: nn.Module) -> None:
    """Make a copy of a prepared module, if it is one, the plain module that it would be without us."""
    mark = vars(module).get("mark_forward_method")
    if not (isinstance(mark, functools.partial) and mark.func is _not_prepared):
        return
    object.__delattr__(module, "mark_forward_method")
    forget_copied_hooks(module)
    for name, method in list(vars(module).items()):
        own = getattr(type(module), name, None)
        if isinstance(method, MethodType) and method.__self__ is module and method.__func__ is own:
            object.__delattr__(module, name)


# torch's own lazy form, as its DistributedDataParallel uses it: `torch.compiler.disable` imports the compiler, 1 s.
@torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
def _uncompiled(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(args, kwargs)
