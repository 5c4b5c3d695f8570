"""List the errors that meshdist raises, as its sources have them, for docs/reference/errors.md."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

import meshdist as md
from meshdist.error_text import ExplainedError
from meshdist.launching.rank_environment import LaunchError

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "meshdist"
AREAS = {
    "annotations": "axis types",
    "backends": "the backend",
    "bench": "`meshdist bench`",
    "bootstrap": "initialization",
    "checking": "any collective",
    "checkpoint": "`md.checkpoint`",
    "cli": "`meshdist run`",
    "collectives": "collectives",
    "ddp": "`DDP`",
    "functional": "collectives",
    "groups": "groups",
    "join": "`Join`",
    "launching": "`meshdist run`",
    "lax": "`md.lax`",
    "mesh": "meshes and specs",
    "optim": "`md.optim`",
    "runtime": "any call",
    "sharding": "sharded arrays",
    "tensor_parallel": "`md.tensor_parallel`",
    "torch_process_groups": "torch's process groups",
    "typed_mode": "axis types",
    "worlds": "initialization",
}
"""What raises an error of each folder, if a few public calls do not."""
_HELPERS = {
    "_argument_error": "ArgumentError",
    "_error": "GradientError",
    "_failure": "RendezvousError",
    "mesh_kind_error": "KindError",
}
"""Functions of the package that make an error, and its class."""
_MOST_CALLS, _MOST_STEPS = 3, 8
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")


@dataclass(frozen=True)
class RaisedError:
    """An error with a text in the code; … is a value of the program.

    Args:
        folder: the folder of the package that raises it.
        raised_by: public calls in code marks, or words.
    """

    first_line: str
    kind: str
    raised_by: str
    fix: str
    folder: str


@dataclass
class _Function:
    """A function or method of the package, with all functions inside it."""

    module: str
    name: str  # Class.method for a method
    mentions: set[str] = field(default_factory=set)
    raises: list[ast.Call] = field(default_factory=list)
    assigned: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def called_as(self) -> str:
        owner, _, name = self.name.rpartition(".")
        return owner if name in _CONSTRUCTORS else name

    def text(self, node: ast.expr, constants: Mapping[str, list[str]]) -> str:
        """Return a text, or all texts that the function or a module assigns to a variable."""
        if isinstance(node, ast.Name):
            texts = self.assigned.get(node.id) or constants.get(node.id, [])
            return "; or: ".join(dict.fromkeys(texts))
        return _text(node)


@cache
def all_errors() -> tuple[RaisedError, ...]:
    """Return each first line once, sorted."""
    functions = [each for path in sorted(PACKAGE.rglob("*.py")) for each in _functions_of(path)]
    callers = _callers_of(functions)
    constants = {
        name: texts
        for each in functions
        if not each.name
        for name, texts in each.assigned.items()
        if name.isupper()
    }
    found: dict[str, tuple[_Function, ast.Call]] = {}
    sources: dict[str, list[_Function]] = defaultdict(list)
    for function in functions:
        for call in function.raises:
            line = _first_line(call)
            found.setdefault(line, (function, call))
            sources[line].append(function)
    errors = []
    for line, (function, call) in found.items():
        folder = function.module.split(".")[1]
        calls = sorted({call for each in sources[line] for call in _public_calls(each, callers)})
        is_short = 0 < len(calls) <= _MOST_CALLS
        by = ", ".join(f"`{each}`" for each in calls) if is_short else AREAS.get(folder, "any call")
        given = [word.value for word in call.keywords if word.arg == "fix"]
        fix = function.text(given[0], constants) if given else ""
        errors.append(RaisedError(line, _kind(call), by, fix, folder))
    return tuple(sorted(errors, key=lambda error: error.first_line.lower()))


def table(errors: Iterable[RaisedError]) -> str:
    """Return a table of the errors in Markdown."""
    head = "| first line | raised by | do this |\n|---|---|---|\n"
    return head + "".join(
        f"| `{error.kind}`: {cell(error.first_line)} | {error.raised_by} | {cell(error.fix)} |\n"
        for error in errors
    )


def cell(text: str) -> str:
    """Return a text as Markdown for a cell of a table."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text).replace("|", "\\|"))
    for number in range(0, len(parts), 2):  # the others are code
        parts[number] = re.sub(r"([*_`\[\]])", r"\\\1", parts[number]).replace("<", "&lt;")
    return "".join(parts)


# -- the functions of the package ---------------------------------------------------------------


def _functions_of(path: Path) -> Iterator[_Function]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    yield _function(module, "", [node for node in body if not _is_definition(node)])
    for node in filter(_is_definition, body):
        assert isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield _function(module, f"{node.name}.{inner.name}", [inner])
        else:
            yield _function(module, node.name, [node])


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


def _function(module: str, name: str, body: list[ast.stmt]) -> _Function:
    function = _Function(module, name)
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Name):
            function.mentions.add(node.id)
        elif isinstance(node, ast.Attribute):
            function.mentions.add(node.attr)
        elif isinstance(node, ast.Call) and _first_line(node):
            function.raises.append(node)
        elif isinstance(node, ast.Assign):
            for name, value in _assignments(node):
                function.assigned[name] += filter(None, [_text(value)])
    return function


def _assignments(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for each, value in zip(target.elts, node.value.elts, strict=False):
                if isinstance(each, ast.Name):
                    yield each.id, value


def _callers_of(functions: list[_Function]) -> dict[str, list[_Function]]:
    """Return the functions that mention each name that one function of the package has."""
    named: dict[str, set[str]] = defaultdict(set)
    for function in functions:
        named[function.called_as].add(f"{function.module}.{function.name}")
    callers: dict[str, list[_Function]] = defaultdict(list)
    for function in functions:
        for name in function.mentions - {function.called_as}:
            if len(named[name]) == 1 or name[:1].isupper():
                callers[name].append(function)
    return callers


# -- public calls -------------------------------------------------------------------------------


def _public_calls(function: _Function, callers: dict[str, list[_Function]]) -> set[str]:
    """Return the public calls that reach ``function`` without another public call between."""
    found, now, seen = set[str](), [function], {id(function)}
    for _ in range(_MOST_STEPS):
        found.update(filter(None, map(_public_name, now)))
        inner = [each for each in now if not _public_name(each)]
        reached = {id(other): other for each in inner for other in callers[each.called_as]}
        now = [other for key, other in reached.items() if key not in seen]
        seen.update(reached)
    return found


def _public_name(function: _Function) -> str:
    if function.module.startswith(("meshdist.cli", "meshdist.launch")):
        return "meshdist run"
    owner, _, name = function.name.rpartition(".")
    if owner == "World" or name == "open_device_group":  # public, but not for programs
        return ""
    public = _public_names()
    if not owner:
        return public.get((function.module, name), "")
    shown = public.get((function.module, owner), "")
    if not shown or name in _CONSTRUCTORS:
        return shown
    return "" if name.startswith("_") else f"{shown}.{name}"


@cache
def _public_names() -> dict[tuple[str, str], str]:
    """Return the public name of each class and function, by module and name in the code."""
    spaces: dict[str, ModuleType] = {
        "": md,
        "lax.": md.lax,
        "checkpoint.": md.checkpoint,
        "attention.": md.attention,
        "experts.": md.experts,
        "optim.": md.optim,
        "tensor_parallel.": md.tensor_parallel,
        "distributed.": md.distributed,
    }
    found: dict[tuple[str, str], str] = {}
    for prefix, space in spaces.items():
        for name in getattr(space, "__all__", dir(space)):
            thing = getattr(space, name)
            if inspect.isroutine(thing) or inspect.isclass(thing):
                key = thing.__module__, getattr(thing, "__qualname__", name)
                found.setdefault(key, f"{prefix}{name}")
    return found


# -- texts in the code --------------------------------------------------------------------------


def _kind(call: ast.Call) -> str:
    """Return the class of the error that a call makes; "" if it makes none."""
    called = getattr(call.func, "id", getattr(call.func, "attr", ""))
    name = _HELPERS.get(called, called if isinstance(call.func, ast.Name) else "")
    kind = LaunchError if name == "LaunchError" else getattr(md.errors, name, None)
    return name if inspect.isclass(kind) and issubclass(kind, ExplainedError) else ""


def _first_line(call: ast.Call) -> str:
    if not _kind(call):
        return ""
    line = _text(call.args[0]) if call.args else ""
    return line if len(line.replace("…", "").split()) > 2 else ""


def _text(node: ast.expr) -> str:
    """Return a text with … for each value; "" if the code has no text here."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"(… ?)+", "… ", "".join(_parts(node))).strip()
    if isinstance(node, ast.BinOp):
        left, right = _text(node.left), _text(node.right)
        return f"{left or '…'}{right or '…'}" if left or right else ""
    if isinstance(node, ast.IfExp):
        return "; or: ".join(filter(None, (_text(node.body), _text(node.orelse))))
    return ""


def _parts(node: ast.JoinedStr) -> Iterator[str]:
    for part in node.values:
        yield str(part.value) if isinstance(part, ast.Constant) else "…"
