"""The errors that the package raises, read from its source: the class, the cause and what to write instead.

An error names what was written, what is so, and what to write instead. Its cause ends where the first sentence or
clause with an imperative begins. `REMEDIES` has what to write for errors whose message leaves it out.
"""

import ast
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PARTS = {
    "Arguments of `Fabric`, and the order of its calls": ["fabric/configure", "fabric/loop", "fabric/output", "fabric"],
    "Checks": ["fabric/checks"],
    "Monitor, trace and report": ["fabric/monitor"],
    "Checkpoints": ["fabric/checkpoints", "strategies/checkpoint"],
    "Commands": ["fabric/cli", "fabric/verify"],
    "Launching": ["launchers"],
    "Devices and precision": ["strategies/accelerators", "strategies/precision"],
    "Collectives": ["strategies/collectives"],
    "Data loaders": ["strategies/data"],
    "`ddp`": ["strategies/ddp"],
    "`fsdp` and `hsdp`": ["strategies/fsdp"],
    "`model_parallel`": ["strategies/model_parallel"],
    "`manual`": ["strategies/manual"],
    "DeepSpeed": ["strategies/deepspeed"],
    "FairScale": ["strategies/fairscale"],
    "Horovod": ["strategies/horovod"],
    "XLA": ["strategies/xla"],
    "Models, gradients and optimizers": ["strategies"],
    "`fabric.lightning`": ["fabric/lightning"],
    "`fabric.testing`": ["fabric/testing"],
}
"""The errors of a folder are those of its modules and of folders within it that are not named here."""

IMPERATIVES = (
    "add|allow|append|average|begin|build|call|cast|change|choose|clip|compute|construct|copy|create|declare|divide|do|draw|end|evaluate|"
    "exclude|export|find|free|give|gather|install|keep|launch|leave|let|load|log|lower|make|mark|merge|move|name|open|"
    "pad|pass|prepare|put|read|register|remove|rename|replace|return|run|save|seed|select|send|set|shard|sort|split|start|step|take|try|"
    "uninstall|unset|update|use|verify|wait|wrap|write"
)
REMEDY = re.compile(
    r"(?:(?<=[.:;]) |(?<=,) (?=or |and )|^)"  # a sentence or clause begins
    rf"(?=(?:to [a-z ]+, |otherwise,? |or |and )?(?:{IMPERATIVES})\b(?! (?:of|is|was|has)\b))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Message:
    """One error. A value that it names is `...`."""

    kind: str
    words: str
    path: str

    @property
    def parts(self) -> tuple[str, str]:
        """The cause, and what to write ('' where neither the message nor `REMEDIES` says it)."""
        for beginning, remedy in REMEDIES.items():
            if beginning in self.words:
                return self.words, remedy
        found = REMEDY.search(re.sub("`[^`]*`", lambda code: "`" * len(code[0]), self.words))  # not within code
        if found is None:
            return self.words, ""
        cause, remedy = self.words[: found.start()].strip(), self.words[found.start() :].strip()
        return cause.rstrip(":;,"), remedy


with (Path(__file__).parent / "remedies.tsv").open() as file:
    REMEDIES = {row["error"]: row["write"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}
"""What to write, by words of the message that leave it out or hold it in a value."""


def messages(part: str) -> list[Message]:
    """The errors of one part, in the order of the alphabet."""
    named = {ROOT / folder for folders in PARTS.values() for folder in folders}
    found = set()
    for folder in (ROOT / each for each in PARTS[part]):
        for path in folder.rglob("*.py"):
            if next(each for each in path.parents if each in named) == folder:
                found |= set(_raised(path))
    return sorted(found, key=lambda each: re.sub(r"[^\w ]", "", each.kind + each.words).lower())


def _raised(path: Path) -> Iterator[Message]:
    """The errors that a module makes."""
    tree = ast.parse(path.read_text())
    strings = _assigned(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        kind = ast.unparse(node.func).rpartition(".")[2]
        if not (re.fullmatch(r"[A-Z]\w*Error", kind) or kind == "SystemExit"):
            continue
        words = " ".join(_words(node.args[0], strings).split())
        if len(re.sub(r"\W", "", words)) > 20:
            yield Message(kind=kind, words=words, path=str(path.relative_to(ROOT)))


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Text that a name of the module holds, where it holds one text alone."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _words(node: ast.expr, strings: dict[str, ast.expr], depth: int = 0) -> str:
    """A message, with `...` for each value that it names."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(each, strings, depth) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return _words(node.value, strings, depth) if isinstance(node.value, ast.Name) else "..."
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left, strings, depth) + _words(node.right, strings, depth)
    if (
        isinstance(node, ast.Name)
        and depth < 2
        and isinstance(strings.get(node.id), (ast.Constant, ast.JoinedStr, ast.BinOp))
    ):
        inner = _words(strings[node.id], strings, depth + 1)
        return inner if " " in inner else "..."
    return "..."
