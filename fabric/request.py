"""What the user asked for: the arguments of `Fabric(...)` and the words of `fabric run`, each checked alone.

A `Request` knows nothing of the machine. Whether its words can go together, and whether this machine can do them, is
for `resolve`. Words are merged here: what the script leaves at its default takes the command line's word, and what both
say differently is an error, for neither can know that it is the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from fabric import spelling
from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.ours import OursEnvironment
from fabric.launchers.world import World
from fabric.spelling import Devices
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy
from fabric.words import words

_PRECISION = Precision.parse("32-true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Exactly what was said. Tests write one directly; `Fabric` uses `build`."""

    accelerator: str | Accelerator = "auto"
    strategy: str | Strategy = "auto"
    devices: Devices = "auto"
    num_nodes: int = 1
    node_rank: int | None = None
    """None, as in the two below: not said."""
    main_address: str | None = None
    main_port: int | None = None
    precision: Precision = _PRECISION
    launcher: str = "auto"
    max_restarts: int | None = None
    """How often `elastic` starts all ranks again. Said on the command line alone; None: not said."""
    deterministic: bool | Literal["warn"] = False
    timeout_seconds: float | None = None
    """None: the strategy's own."""
    say_after_seconds: float = spelling.DEFAULT_SAY_AFTER_SECONDS
    environment: Environment | None = None
    """The user's own cluster environment, from `plugins`."""
    callbacks: tuple[Any, ...] = ()
    loggers: tuple[Any, ...] = ()

    @classmethod
    def build(cls, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Request:
        """Check each word of `Fabric(**arguments)` and of `fabric run`, and merge them.

        `arguments`: by the names of `Fabric`'s parameters; a missing one is at its default.
        Raises: ValueError, TypeError: a word is none, or was said twice with different values.
        """
        said = {name: _READ[name](value, f"{name}={value!r}") for name, value in arguments.items() if name in _READ}
        typed = {name: _READ[name](value, f"{_option(name)} {value}") for name, value in words(environ).items()}
        if _is_one_within_ours(cls(**said), environ):
            typed = {name: word for name, word in typed.items() if name in ("accelerator", "precision")}
        precision, environment = _split_plugins(each(arguments.get("plugins"), "plugins"))
        if precision is not None:
            _add_precision(said, arguments, precision)
        return cls(
            **_merge(said, typed),
            environment=environment,
            callbacks=each(arguments.get("callbacks"), "callbacks"),
            loggers=each(arguments.get("loggers"), "loggers"),
        )

    def asks_for_one(self, world: World) -> bool:
        """Whether it describes one process on one device, and could not mean this world of several."""
        if self.num_nodes > 1 or self.launcher != "auto" or not (self.devices == 1 or _is_one_index(self.devices)):
            return False
        if isinstance(self.strategy, Strategy):
            return self.strategy.launchers == ("inline",)
        return self.strategy == "single_device" or (self.strategy == "auto" and world.local_size > 1)


def _is_one_index(devices: Devices) -> bool:
    return isinstance(devices, tuple) and len(devices) == 1


def _is_one_within_ours(request: Request, environ: Mapping[str, str]) -> bool:
    """Whether this process is a rank that our launcher made, to which the words of `fabric run` belong, and the script
    asks for a world of one process beside it."""
    ours = OursEnvironment()
    if not ours.detect(environ):
        return False
    world = ours.world(environ)
    return world.size > 1 and request.asks_for_one(world)


def each(value: object, name: str) -> tuple[Any, ...]:
    """One object, several, or None, as a tuple. Raises where one is a word, or comes twice."""
    several = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    for position, one in enumerate(several):
        if isinstance(one, str):
            raise TypeError(f"`{name}` holds the word {one!r}. Pass the object itself.")
        if any(one is other for other in several[:position]):
            raise ValueError(f"`{name}` holds {one!r} twice. Pass each object once.")
    return several


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _merge(said: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Each word once. `auto` on the command line says nothing, as the default does in the script."""
    default = {field.name: field.default for field in fields(Request)}
    merged = dict(said)
    for name, word in typed.items():
        mine = said.get(name, default[name])
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


def _split_plugins(plugins: tuple[Any, ...]) -> tuple[Precision | None, Environment | None]:
    kinds: dict[type, Any] = {}
    for plugin in plugins:
        kind = next((role for role in (Precision, Environment) if isinstance(plugin, role)), None)
        if kind is None:
            raise TypeError(
                f"`plugins` holds {plugin!r}, a `{type(plugin).__name__}`. Pass a `Precision` or an `Environment`; "
                f"accelerators, strategies, loggers and callbacks have arguments of their own."
            )
        if kind in kinds:
            raise ValueError(f"`plugins` holds two of one kind: {kinds[kind]!r} and {plugin!r}. Pass one.")
        kinds[kind] = plugin
    return kinds.get(Precision), kinds.get(Environment)


def _add_precision(said: dict[str, Any], arguments: Mapping[str, Any], plugin: Precision) -> None:
    if said.get("precision", _PRECISION) not in (_PRECISION, plugin):
        raise ValueError(
            f"`precision={arguments['precision']!r}` and the plugin {plugin.name!r} are both a precision. Pass one."
        )
    said["precision"] = plugin


def _read_accelerator(value: object, said: str) -> str | Accelerator:
    return value if isinstance(value, Accelerator) else _word_or("an `Accelerator`", value, said)


def _read_strategy(value: object, said: str) -> str | Strategy:
    return value if isinstance(value, Strategy) else _word_or("a `Strategy`", value, said)


def _word_or(kind: str, value: object, said: str) -> str:
    if isinstance(value, str):
        return spelling.read_word(value, said)
    made = f"`{value.__name__}()`, an instance" if isinstance(value, type) else f"a name or {kind}"
    raise TypeError(f"`{said}` is neither a name nor {kind}. Pass {made}.")


def _read_precision(value: Any, said: str) -> Precision:
    return Precision.parse(value)


def _read_deterministic(value: object, said: str) -> bool | Literal["warn"]:
    if value is True or value is False or value == "warn":
        return value
    raise ValueError(f"`{said}`: write True, False, or 'warn' to be told where an operation is not deterministic.")


def _read_timeout(value: object, said: str) -> float | None:
    return None if value is None else spelling.read_seconds(value, said)


_READ: Mapping[str, Callable[[Any, str], Any]] = {
    "accelerator": _read_accelerator,
    "strategy": _read_strategy,
    "devices": spelling.read_devices,
    "num_nodes": spelling.read_count,
    "node_rank": spelling.read_rank,
    "main_address": spelling.read_word,
    "main_port": spelling.read_port,
    "precision": _read_precision,
    "launcher": spelling.read_launcher,
    "max_restarts": spelling.read_rank,
    "deterministic": _read_deterministic,
    "timeout_seconds": _read_timeout,
    "say_after_seconds": spelling.read_seconds,
}
