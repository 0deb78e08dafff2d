"""Wrap `forward` of the user's own module with a strategy's code.

The module keeps its class and identity: an instance attribute `forward` runs the strategy's code around the user's
method. Other methods that compute a loss are wrapped by `mark_forward_method`. A nested call runs the strategy's code
once, and copies and pickles of a prepared module are plain modules. A module that was given its attributes
(`clone.__dict__ = module.__dict__.copy()`) has this `forward`, too, and runs the prepared module.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, final

import torch
from torch import nn

from fabric.strategies.module.deepcopy import forget_copied_hooks
from fabric.strategies.torch_internals import disable_dynamo, require_compiler
from fabric.strategies.undo import replace_attributes

eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_compiler: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)
"""The compiler under which the calling function runs, or None."""

Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`around(function, args, kwargs)` calls `function` with the strategy's code around it and returns its result."""


@final
class ForwardPath:
    """The wrapped methods of one module. `around=None`: they are not wrapped.

    `on_mark`: called with the name of each further method before it is wrapped; may replace it.
    `uncompilable`: the text of the error of a compiled call, if the strategy does not support one.
    """

    def __init__(
        self,
        module: nn.Module,
        around: Around | None,
        on_mark: Callable[[str], None] = lambda name: None,
        uncompilable: str | None = None,
    ) -> None:
        mark = vars(module).get("mark_forward_method")
        if isinstance(mark, functools.partial) and mark.func is _not_prepared:  # a copy of a prepared module
            object.__delattr__(module, "mark_forward_method")
            forget_copied_hooks(module)
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
        self.num_calls = 0
        """The number of calls of forward and of marked methods so far."""
        self.on_call: Callable[[], None] | None = None
        """Called before each call, while a check wants it."""
        self.kept: list[object] = []
        """What lives as long as the module: see Note [What was set up lives as long as the program has it]."""
        self._given: dict[str, Any] = {}
        self._replace("forward")
        object.__setattr__(module, "mark_forward_method", self)

    def __call__(self, method: str | Callable[..., Any]) -> None:
        """`module.mark_forward_method`: wrap another method as `forward` is.

        Raises: AttributeError: the module has no such method.
        """
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

    def bypass(self, around: Around | None) -> Callable[[], None]:
        """Run the wrapped methods with `around` instead of the strategy's code. Returns a function that undoes it."""
        kind, methods = type(self.module), dict[str, Any]()
        for name, given in self._given.items():
            function = getattr(kind, name).__get__(self.module) if given is None else given
            methods[name] = function if around is None else _with_code(around, function)
        return replace_attributes(self.module, **methods)

    def release(self) -> None:
        """Restore the module's own methods."""
        for name, given in self._given.items():
            if given is None:
                vars(self.module).pop(name, None)
            else:
                object.__setattr__(self.module, name, given)
        object.__delattr__(self.module, "mark_forward_method")

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_not_prepared, type(self.module).__name__)

    def _replace(self, name: str) -> None:
        if self.around is not None:
            self._given[name] = vars(self.module).get(name)
            method = _Method(self, self.around, name, getattr(self.module, name), self._given[name])
            object.__setattr__(self.module, name, method)


@final
class _Method:
    """A method of the user's module with the strategy's code around it. `given`: the instance attribute that it
    replaces; None if the class has the method."""

    def __init__(self, path: ForwardPath, around: Around, name: str, function: Callable[..., Any], given: Any) -> None:
        functools.update_wrapper(self, function)
        self._path, self._around, self._name, self._function, self._given = path, around, name, function, given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._path.running:  # forward called by a marked method, or by itself
            return self._function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return outside_of_graphs(self._run_compiled, self._function, args, kwargs)
        if _compiler() is not None:
            return _paused(self._run_compiled, self._function, args, kwargs)
        self._path.running = True  # as `_run_compiled`, without the call: this is in every step
        self._path.num_calls += 1
        if self._path.on_call is not None:
            self._path.on_call()
        try:
            return self._around(self._function, args, kwargs)
        finally:
            self._path.running = False

    def _run_compiled(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._path.uncompilable is not None:
            raise RuntimeError(self._path.uncompilable)
        self._path.running = True
        self._path.num_calls += 1
        if self._path.on_call is not None:
            self._path.on_call()
        try:
            return self._around(function, args, kwargs)
        finally:
            self._path.running = False

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given is not None:
            return _itself, (self._given,)
        return getattr, (self._path.module, self._name)  # unpickled in a copy, whose class has the plain method


def _with_code(around: Around, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the user's module within `around`."""
    return functools.update_wrapper(functools.partial(_call, around, function), function)


def _call(around: Around, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return around(function, args, kwargs)


def _not_prepared(name: str, method: str | Callable[..., Any]) -> None:
    raise RuntimeError(
        f"`mark_forward_method({method!r})` on a copy of a prepared `{name}`: a copy is a plain module. "
        "Pass the copy to `fabric.setup` first."
    )


def _itself(given: Any) -> Any:
    return given


# Note [Only the user's functions are compiled]
# `torch.compile` also compiles the functions that a compiled function calls. Ours must not be: they would be compiled
# again for each model, and their writes through `.data`, into tensors that autograd has saved, would count as in-place
# changes. `torch.compiler.disable` does not fit: it disables one function, or all that it calls, the user's included.
# So torch skips `_Method.__call__`, and the compiler is paused for the strategy's code. With `fullgraph=True`, the
# graph is that of the user's method.


def _paused(run: Around, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `run(function, args, kwargs)`, and compile `function` alone."""
    compiler = getattr(eval_frame, "set_eval_frame", lambda _: require_compiler())(None)
    require_compiler()
    called = function
    if function.__module__.startswith("torch."):  # torch compiles its own functions only when others call them
        from torch._dynamo.external_utils import wrap_inline

        called = wrap_inline(function)

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(compiler)
        try:
            return called(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    try:
        return run(compiled, args, kwargs)
    finally:
        eval_frame.set_eval_frame(compiler)


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Make torch's compiler skip a function, but compile the functions that it calls."""
    with suppress(AttributeError):  # otherwise it is compiled up to `_paused`, which raises
        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(function.__code__, skip)


leave_uncompiled(_Method.__call__)
leave_uncompiled(_paused)


# The lazy form that torch's DistributedDataParallel uses: `torch.compiler.disable` imports the compiler, 1 s.
@functools.partial(disable_dynamo, recursive=False)
def outside_of_graphs(run: Around, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Break the graph of the calling function, then as `_paused`."""
    return _paused(run, function, args, kwargs)
