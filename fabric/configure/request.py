"""The user's arguments: those of `Fabric(...)` and the options of `fabric run`, each checked on its own.

A `Request` knows nothing of the machine: `resolve` checks combinations, and what the machine can do. Both sources are
merged here: an argument that the script leaves at its default is taken from the command line. It is an error if both
give different values, because neither may override the other silently.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from fabric.checks.check import Check
from fabric.configure.parse import DEFAULT_REPORT_AFTER_SECONDS, OPTIONS, Devices, Read, flag, one_of, read_word
from fabric.configure.run_options import options_in
from fabric.launchers.environments.environment import Environment
from fabric.launchers.environments.torchelastic import OursEnvironment
from fabric.launchers.world import World
from fabric.strategies.accelerators.accelerator import Accelerator
from fabric.strategies.precision.precision import Precision
from fabric.strategies.strategy import Strategy

T = TypeVar("T")

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
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each field that is not at its default comes from: "argument" or "command line"."""
    explain: bool = False
    """Whether the program shows its settings, and ends: under `fabric explain`."""

    @classmethod
    def build(cls, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> "Request":
        """Check each argument of `Fabric(**arguments)` and each option of `fabric run`, and merge them.

        `arguments`: by the names of `Fabric`'s parameters; a missing one is at its default.
        Raises: ValueError, TypeError: a value is wrong, or the two sources give different ones.
        """
        written = {name: _READ[name](value, f"{name}={value!r}") for name, value in arguments.items() if name in _READ}
        options = options_in(environ)
        explain = options.pop("explain", None)
        recorded = json.loads(str(options.pop("record", "{}")))  # the run is recorded, for `fabric verify`
        typed = {name: _READ[name](value, f"{flag(name)} {value}") for name, value in options.items()}
        if recorded:  # the command line says what is compared
            if recorded["in_place_of"] is not None and isinstance(asked := written.get("strategy"), Strategy):
                typed["strategy"] = asked.in_one_process()
            is_asked = recorded["in_place_of"] is None  # then options of a strategy are not dropped unsaid
            written = {
                name: value
                for name, value in written.items()
                if name not in typed or (is_asked and isinstance(value, Strategy))
            }
        ours = OursEnvironment()
        if ours.detect(environ) and (world := ours.world(environ)).size > 1 and cls(**written).asks_for_one(world):
            # The other options are for the ranks, not for a separate world of one process inside a rank.
            typed, recorded = {name: word for name, word in typed.items() if name in ("accelerator", "precision")}, {}
        plugins = _several(arguments.get("plugins"))
        for plugin in plugins:
            if not isinstance(plugin, Precision | Environment | Check):
                raise TypeError(
                    f"`plugins` holds {plugin!r}, a `{type(plugin).__name__}`. Pass a `Precision`, an `Environment` or "
                    "a `Check`; accelerators, strategies, loggers and callbacks have arguments of their own."
                )
        precision = _only([plugin for plugin in plugins if isinstance(plugin, Precision)])
        if precision is not None:
            if written.get("precision", _PRECISION) not in (_PRECISION, precision):
                raise ValueError(
                    f"`precision={arguments['precision']!r}` and the plugin {precision.name!r} both set the precision. "
                    "Pass one."
                )
            written["precision"] = precision
        merged = _merge(written, typed)
        sources = {
            name: "argument" for name, value in {**arguments, **written}.items() if value != _DEFAULTS.get(name, ())
        }
        sources.update({name: "command line" for name, word in typed.items() if word != "auto"})
        checks = [plugin for plugin in plugins if isinstance(plugin, Check)]
        if recorded:
            from fabric.checks.verify_record import Recorder, Recording

            checks.insert(0, Recorder(Recording(**recorded), merged.get("strategy", "auto")))
        return cls(
            **merged,
            environment=_only([plugin for plugin in plugins if isinstance(plugin, Environment)]),
            checks=tuple(checks),
            callbacks=_several(arguments.get("callbacks")),
            loggers=_several(arguments.get("loggers")),
            sources=sources,
            explain=bool(explain),
        )

    def asks_for_one(self, world: World) -> bool:
        """Whether it describes one process on one device, and cannot mean this world of several."""
        is_one = self.devices == 1 or (isinstance(self.devices, tuple) and len(self.devices) == 1)
        if self.num_nodes > 1 or self.launcher != "auto" or not is_one:
            return False
        if isinstance(self.strategy, Strategy):
            return self.strategy.launchers == ("inline",)
        return self.strategy == "single_device" or (self.strategy == "auto" and world.local_size > 1)


_DEFAULTS = {field.name: field.default for field in fields(Request)}


def _several(value: object) -> tuple[Any, ...]:
    """One object, several, or None, as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


def _only(plugins: Sequence[T]) -> T | None:
    if len(plugins) > 1:
        raise ValueError(f"`plugins` holds two of the same kind: {plugins[0]!r} and {plugins[1]!r}. Pass one.")
    return plugins[0] if plugins else None


def _merge(written: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument once. `auto` on the command line counts as not given, as the default does in the script."""
    merged = dict(written)
    for name, word in typed.items():
        mine = written.get(name, _DEFAULTS[name])
        if word in ("auto", mine):
            continue
        if mine != _DEFAULTS[name]:
            script = f"{type(mine).__name__}(...)" if isinstance(mine, Strategy) else repr(_shown(mine))
            raise ValueError(
                f"The script says `Fabric({name}={script})` and the command line `{flag(name)} {_shown(word)}`. "
                f"Leave one of them out{_NAME_IT * isinstance(mine, Strategy)}."
            )
        merged[name] = word
    return merged


_NAME_IT = ", or name the object by `register_strategy`, and choose the name by `--strategy` alone"


def _shown(value: Any) -> Any:
    """A value as the user would write it."""
    return value.name if isinstance(value, Precision) else value


def _word_or(kind: type) -> Read:
    """Parses a name, or an object of this kind."""

    def read(value: object, written: str) -> object:
        if isinstance(value, kind):
            return value
        if not isinstance(value, str):
            raise TypeError(f"`{written}` is neither a name nor an instance of `{kind.__name__}`. Pass one of them.")
        return read_word(value, written)

    return read


def _or_none(name: str) -> Read:
    """Parses an argument that may be None."""
    return lambda value, written: None if value is None else OPTIONS[name].read(value, written)


_READ: Mapping[str, Read] = {
    **{name: option.read for name, option in OPTIONS.items()},
    **{name: _or_none(name) for name in ("timeout_seconds", "stop_grace_seconds", "log_dir")},
    "accelerator": _word_or(Accelerator),
    "strategy": _word_or(Strategy),
    "precision": lambda value, written: Precision.parse(value),
    "deterministic": one_of(True, False, "warn"),
}
