"""The user's arguments: those of `Fabric(...)` and the options of `fabric run`, each checked on its own.

A `Request` knows nothing of the machine: `resolve` checks combinations, and what the machine can do. Both sources are
merged here: an argument that the script leaves at its default is taken from the command line. It is an error if both
give different values, because neither may override the other silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fabric.checks.check import Check
from fabric.configure.options import DEFAULT_REPORT_AFTER_SECONDS, OPTIONS, Devices, Read, read_word
from fabric.configure.run_options import options_in
from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.ours import OursEnvironment
from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy

_PRECISION = Precision.parse("32-true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments as written. Tests create one directly; `Fabric` uses `build`."""

    accelerator: str | Accelerator = "auto"
    strategy: str | Strategy = "auto"
    devices: Devices = "auto"
    num_nodes: int = 1
    node_rank: int | None = None
    """None, as for the two below: not given."""
    main_address: str | None = None
    main_port: int | None = None
    precision: Precision = _PRECISION
    launcher: str = "auto"
    max_restarts: int | None = None
    """The maximal number of restarts of `elastic`, a command-line option; None: not given."""
    deterministic: bool | Literal["warn"] = False
    timeout_seconds: float | None = None
    """None: the strategy's own."""
    report_after_seconds: float = DEFAULT_REPORT_AFTER_SECONDS
    stop_grace_seconds: float | None = None
    """None: 30 s, and as long as a save takes."""
    sanitize: Literal["start", "always", False] | int = "start"
    """Which steps the ranks compare."""
    log_dir: str | None = None
    """None: no files for the output of the ranks."""
    prefix_output: bool = False
    environment: Environment | None = None
    """A custom cluster environment, from `plugins`."""
    checks: tuple[Check, ...] = ()
    """The user's own, from `plugins`."""
    callbacks: tuple[Any, ...] = ()
    loggers: tuple[Any, ...] = ()

    @classmethod
    def build(cls, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Request:
        """Check each argument of `Fabric(**arguments)` and each option of `fabric run`, and merge them.

        `arguments`: by the names of `Fabric`'s parameters; a missing one is at its default.
        Raises: ValueError, TypeError: a value is wrong, or the two sources give different ones.
        """
        written = {name: _READ[name](value, f"{name}={value!r}") for name, value in arguments.items() if name in _READ}
        typed = {name: _READ[name](value, f"{_option(name)} {value}") for name, value in options_in(environ).items()}
        if _is_one_within_ours(cls(**written), environ):
            typed = {name: word for name, word in typed.items() if name in ("accelerator", "precision")}
        plugins = each(arguments.get("plugins"), "plugins")
        checks = tuple(plugin for plugin in plugins if isinstance(plugin, Check))
        precision, environment = _split_plugins([plugin for plugin in plugins if not isinstance(plugin, Check)])
        if precision is not None:
            _add_precision(written, arguments, precision)
        return cls(
            **_merge(written, typed),
            environment=environment,
            checks=checks,
            callbacks=each(arguments.get("callbacks"), "callbacks"),
            loggers=each(arguments.get("loggers"), "loggers"),
        )

    def asks_for_one(self, world: World) -> bool:
        """Whether it describes one process on one device, and cannot mean this world of several."""
        is_one = self.devices == 1 or (isinstance(self.devices, tuple) and len(self.devices) == 1)
        if self.num_nodes > 1 or self.launcher != "auto" or not is_one:
            return False
        if isinstance(self.strategy, Strategy):
            return self.strategy.launchers == ("inline",)
        return self.strategy == "single_device" or (self.strategy == "auto" and world.local_size > 1)


def _is_one_within_ours(request: Request, environ: Mapping[str, str]) -> bool:
    """Whether our launcher made this process, which the options of `fabric run` are meant for, and the script asks for
    a separate world of one process."""
    ours = OursEnvironment()
    if not ours.detect(environ):
        return False
    world = ours.world(environ)
    return world.size > 1 and request.asks_for_one(world)


def each(value: object, name: str) -> tuple[Any, ...]:
    """One object, several, or None, as a tuple. Raises for a string, a class, and an object that is given twice."""
    several = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    for position, one in enumerate(several):
        if isinstance(one, str):
            raise TypeError(f"`{name}` holds the string {one!r}. Pass the object itself.")
        if isinstance(one, type):
            raise TypeError(f"`{name}` holds the class `{one.__name__}`. Pass an instance, `{one.__name__}(...)`.")
        if any(one is other for other in several[:position]):
            raise ValueError(f"`{name}` holds {one!r} twice. Pass each object once.")
    return several


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _merge(written: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument once. `auto` on the command line counts as not given, as the default does in the script."""
    default = {field.name: field.default for field in fields(Request)}
    merged = dict(written)
    for name, word in typed.items():
        mine = written.get(name, default[name])
        if word in ("auto", mine):
            continue
        if mine != default[name]:
            raise ValueError(
                f"The script says `Fabric({name}={_shown(mine)!r})` and the command line `{_option(name)} "
                f"{_shown(word)}`. Leave one of them out."
            )
        merged[name] = word
    return merged


def _shown(value: Any) -> Any:
    """A value as the user would write it."""
    return value.name if isinstance(value, Precision) else value


def _split_plugins(plugins: Sequence[Any]) -> tuple[Precision | None, Environment | None]:
    kinds: dict[type, Any] = {}
    for plugin in plugins:
        kind = next((role for role in (Precision, Environment) if isinstance(plugin, role)), None)
        if kind is None:
            raise TypeError(
                f"`plugins` holds {plugin!r}, a `{type(plugin).__name__}`. Pass a `Precision`, an `Environment` or a "
                f"`Check`; accelerators, strategies, loggers and callbacks have arguments of their own."
            )
        if kind in kinds:
            raise ValueError(f"`plugins` holds two of the same kind: {kinds[kind]!r} and {plugin!r}. Pass one.")
        kinds[kind] = plugin
    return kinds.get(Precision), kinds.get(Environment)


def _add_precision(written: dict[str, Any], arguments: Mapping[str, Any], plugin: Precision) -> None:
    if written.get("precision", _PRECISION) not in (_PRECISION, plugin):
        raise ValueError(
            f"`precision={arguments['precision']!r}` and the plugin {plugin.name!r} both set the precision. Pass one."
        )
    written["precision"] = plugin


def _read_accelerator(value: object, written: str) -> str | Accelerator:
    return value if isinstance(value, Accelerator) else _word_or("an `Accelerator`", value, written)


def _read_strategy(value: object, written: str) -> str | Strategy:
    return value if isinstance(value, Strategy) else _word_or("a `Strategy`", value, written)


def _word_or(kind: str, value: object, written: str) -> str:
    if isinstance(value, str):
        return read_word(value, written)
    made = f"`{value.__name__}()`, an instance" if isinstance(value, type) else f"a name or {kind}"
    raise TypeError(f"`{written}` is neither a name nor {kind}. Pass {made}.")


def _read_deterministic(value: object, written: str) -> bool | Literal["warn"]:
    if value is True or value is False or value == "warn":
        return value
    raise ValueError(
        f"`{written}`: write True, False, or 'warn' for a warning at operations that are not deterministic."
    )


def _or_none(name: str) -> Read:
    """Parses an argument that may be None."""
    return lambda value, written: None if value is None else OPTIONS[name](value, written)


_READ: Mapping[str, Read] = {
    **OPTIONS,
    **{name: _or_none(name) for name in ("timeout_seconds", "stop_grace_seconds", "log_dir")},
    "accelerator": _read_accelerator,
    "strategy": _read_strategy,
    "precision": lambda value, written: Precision.parse(value),
    "deterministic": _read_deterministic,
}
