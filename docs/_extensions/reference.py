"""Reference pages from the package itself: docstrings as our pages write them, and lists that are read from the code.

A page has `<!-- generated: NAME -->` where one of `LISTS` is to stand. Docstrings are Markdown in the style of this
package (`Raises: Error: why.`); autodoc reads reStructuredText, so they are translated.
"""

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from messages import PARTS, messages
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
FIELDS = "Ranks|Shapes|Cost|Gradient|Raises|Source|Dtypes|Memory|Returns|None|Several|Empty"


def directive(kind: str, name: str, *options: str) -> str:
    """A directive of autodoc within Markdown."""
    lines = [f".. {kind}:: {name}", *(f"   :{option}:" for option in options)]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


def names_of(module_name: str, *, heading: str = "##") -> str:
    """Each public name of a module, below a heading of its own."""
    module, first = importlib.import_module(module_name), importlib.import_module("fabric")
    found = []
    for name in sorted(_public(module)):
        value = getattr(module, name)
        if module is not first and name in first.__all__:
            continue  # it is on the page of `fabric`
        found.append(f"{heading} `{name}`\n")
        if inspect.isclass(value):
            found.append(directive("autoclass", f"{module_name}.{name}", "members", "show-inheritance"))
        elif callable(value):
            found.append(directive("autofunction", f"{module_name}.{name}"))
        else:
            found.append(directive("autodata", f"{module_name}.{name}", "no-value"))
    return "\n".join(found)


def _public(module: Any) -> list[str]:
    """`__all__`, or the names that it imports as themselves (`from ... import Name as Name`)."""
    tree = ast.parse(inspect.getsource(module))
    imported = [each for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in node.names]
    return list(getattr(module, "__all__", None) or {each.asname for each in imported if each.asname == each.name})


def strategies() -> str:
    """Each strategy: its docstring, the names by which it is passed, and each option with its default."""
    from fabric.strategies import Strategy
    from fabric.strategies.strategy_registry import strategy_registrations

    module, found = importlib.import_module("fabric.strategies"), []
    registered: dict[type, list[str]] = {}
    for name, registration in strategy_registrations().items():
        if registration.source == "torchfabric":
            registered.setdefault(type(registration.make()), []).append(name)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if not (inspect.isclass(value) and issubclass(value, Strategy) and value is not Strategy):
            continue
        words = ", ".join(f'`strategy="{each}"`' for each in registered[value])
        found.append(f"## `{name}`\n\n{words}\n")
        found.append(directive("autoclass", f"fabric.strategies.{name}"))
    return "\n".join(found)


def commands() -> str:
    """Each command of the command line, with its options, as its parser has them."""
    from fabric.cli import parser

    (subcommands,) = [each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
    helps = {each.dest: each.help or "" for each in subcommands._choices_actions}
    found = []
    for name, command in subcommands.choices.items():
        found.append(f"## `fabric {name}`\n\n{command.description or _sentence(helps[name])}\n")
        for action in command._actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            words = " or ".join(f"`{option} {value}`".replace(" `", "`") for option in action.option_strings)
            default = ""
            if action.option_strings and action.default not in (None, False, argparse.SUPPRESS):
                default = f" Default: `{action.default}`."
            found.append(f"- {words or f'`{value}`'}: {_sentence(action.help or '')}{default}")
        found.append("")
    return "\n".join(found)


def errors() -> str:
    """Each error that the package raises, with its cause and what to write instead, by the part that raises it."""
    found = []
    for part in PARTS:
        lines = []
        for each in messages(part):
            cause, remedy = each.parts
            lines.append(f"- `{each.kind}`: {cause}\n  - **Write**: {remedy[:1].upper() + remedy[1:]}")
        found.append(f"### {part}\n\n" + "\n".join(dict.fromkeys(lines)) + "\n")
    return "\n".join(found)


def unsupported() -> str:
    """What each strategy does not support, with the error that its use raises."""
    from fabric.strategies.strategy_registry import strategy_registrations

    found: dict[str, tuple[str, list[str]]] = {}
    for name, registration in strategy_registrations().items():
        if registration.source == "torchfabric":
            for capability, words in registration.make().lacks.items():
                found.setdefault(words, (capability, []))[1].append(f"`{name}`")
    lines = ["| case | strategies | error |", "|---|---|---|"]
    for words, (capability, names) in found.items():
        lines.append(f"| `{capability}` | {', '.join(names)} | {' '.join(words.split()).replace('|', '/')} |")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    text = text.replace("%%", "%").strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".") if text else ""


HOW_TO = {
    "Launch": "launch notebooks slurm kubernetes tpu rank-zero",
    "The loop": "accumulate weight-by-tokens gradient-clipping mixed-precision scheduler several-models other-methods "
    "batch-norm weight-averaging compile optimizers callbacks",
    "Data": "batch-size seeds iterable-dataset token-batches",
    "Evaluate, save and stop": "evaluate checkpoints best-checkpoint resume early-stopping preemption",
    "Memory and strategies": "choose-a-strategy strategies memory fsdp deepspeed lora tensor-parallel",
    "See what happens": "own-logger monitor report profiling hangs verify",
    "Extend": "own-strategy own-check own-environment",
    "Move": "migrate",
}


def how_to() -> str:
    """The pages by subject, and those of no subject below them."""
    folder = ROOT / "docs/how-to"
    named = {name for names in HOW_TO.values() for name in names.split()}
    others = sorted(path.stem for path in folder.glob("*.md") if path.stem not in named | {"index"})
    groups = {**HOW_TO, **({"More": " ".join(others)} if others else {})}
    tree = "```{{toctree}}\n:maxdepth: 1\n\n{}\n```\n"
    return "\n".join(f"## {title}\n\n" + tree.format("\n".join(names.split())) for title, names in groups.items())


LISTS = {
    "how to": how_to,
    "fabric": lambda: names_of("fabric"),
    "strategies": strategies,
    "parts of strategies": lambda: _without_strategies(),
    "launchers": lambda: names_of("fabric.launchers"),
    "testing": lambda: names_of("fabric.testing"),
    "commands": commands,
    "errors": errors,
    "unsupported": unsupported,
}


def _without_strategies() -> str:
    from fabric.strategies import Strategy

    module, found = importlib.import_module("fabric.strategies"), []
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value) and issubclass(value, Strategy) and value is not Strategy:
            continue
        found.append(f"## `{name}`\n")
        kind = "autoclass" if inspect.isclass(value) else "autofunction"
        found.append(directive(kind, f"fabric.strategies.{name}", *(["members"] if kind == "autoclass" else [])))
    return "\n".join(found)


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the lists in their places."""

    def text(place: re.Match[str]) -> str:
        return LISTS[place[1]]()

    source[0] = re.sub(r"<!-- generated: ([\w ]+) -->", text, source[0])


def outdated(app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Pages with such a list are read again in each build: Sphinx does not know on what they depend."""
    return [name for name in env.found_docs if "<!-- generated: " in Path(env.doc2path(name)).read_text()]


def translate(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """A docstring of ours as reStructuredText, and after the one of a strategy the list of its options."""
    text = "\n".join(lines)
    if what == "class" and is_dataclass(value):
        text, _, _ = text.partition("\nArgs:\n")
    text = re.sub(rf"(?m)(?<=\S) (?=(?:{FIELDS}): )", "\n\n", text)  # `... Ranks: all.` begins a paragraph of its own
    text = re.sub(rf"(?m)^(?=(?:{FIELDS}): )", "\n", text)
    lines[:] = _rest(text).splitlines()
    if what == "class" and is_dataclass(value):
        documented, as_attribute = option_docs(value), not options.get("members")
        for field in fields(value):
            if field.name.startswith("_") or not field.init or not documented.get(field.name):
                continue
            default = "" if field.default is MISSING else f" Default: ``{_default(field.default)}``."
            said = _rest(" ".join(documented[field.name].split())) + default
            if as_attribute:  # a name of its own, which the search finds
                lines += ["", f".. py:attribute:: {field.name}", "", f"   {said}", ""]
            elif field.name not in _own_docs(value):  # autodoc has the others
                lines += ["", f"``{field.name}``", f"   {said}", ""]


def _default(value: object) -> str:
    return getattr(value, "__name__", repr(value))


def option_docs(strategy: type) -> dict[str, str]:
    """What is documented of each option: in `Args:` of the class or of one that it derives from, or below the field."""
    found: dict[str, str] = {}
    for each in reversed(strategy.__mro__):
        doc = inspect.cleandoc(each.__dict__.get("__doc__") or "")
        _, _, args = doc.partition("\nArgs:\n")
        for option in re.findall(r"(?m)^    (\w+): ((?:.*\n?)(?:(?:     +.*)?(?:\n|\Z))*)", args):
            found[option[0]] = option[1]
        found |= _own_docs(each)
    return found


def _own_docs(value: type) -> dict[str, str]:
    """The docstrings below the fields of a class of ours."""
    found: dict[str, str] = {}
    if not value.__module__.startswith("fabric"):
        return found
    for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(value.__module__)))):
        if isinstance(node, ast.ClassDef) and node.name == value.__name__:
            for field, said in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr):
                    found[ast.unparse(field.target)] = ast.literal_eval(said.value)
    return found


def _rest(text: str) -> str:
    """Text and indented code: code begins after a line of text that is less indented, and may follow it at once."""
    return "\n\n".join("::\n\n" + block if is_code else _inline(block) for block, is_code in _blocks(text))


def _blocks(text: str) -> Iterator[tuple[str, bool]]:
    """Runs of lines that are code (indented by four), or text."""
    run: list[str] = []
    was_code = False
    for line in text.splitlines():
        is_code = line.startswith("    ") if line.strip() else was_code
        if is_code != was_code and run:
            yield "\n".join(run).strip("\n"), was_code
            run = []
        run, was_code = [*run, line], is_code
    yield "\n".join(run).strip("\n"), was_code


def _inline(text: str) -> str:
    """Markdown's code is reStructuredText's literal; all else that it would read as markup is text."""
    parts = re.split(r"(`[^`]+`)", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"``{' '.join(part.strip('`').split())}``"
            after = parts[index + 1][:1]
            if after and (after.isalnum() or after in "(["):
                parts[index + 1] = "\\ " + parts[index + 1]
            if parts[index - 1][-1:].isalnum() or parts[index - 1][-1:] == "_":
                parts[index - 1] += "\\ "
        else:
            parts[index] = re.sub(r"(?<!\\)([*|])", r"\\\1", re.sub(r"(\w)_(?!\w)", r"\1\\_", part))
    return re.sub(rf"(?m)^((?:{FIELDS}):) ", r"**\1** ", "".join(parts))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("env-get-outdated", outdated)
    app.connect("autodoc-process-docstring", translate)
    return {"parallel_read_safe": True}
